"""The worker's half of the vLLM connector."""
