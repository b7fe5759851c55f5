"""The scheduler's half of the vLLM connector."""
