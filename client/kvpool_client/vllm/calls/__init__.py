"""vLLM's calls to its connector, by the side that they are for."""
