"""Hybrid models through the vLLM connector."""
