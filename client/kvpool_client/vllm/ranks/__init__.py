"""Ranks of a vLLM engine: where they are, which stage and heads each has, and which of them hold the same KV."""
