"""A real vLLM through the pool; see `conftest`."""
