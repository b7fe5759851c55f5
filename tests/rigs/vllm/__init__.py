"""Tools of the tests of the vLLM connector."""
