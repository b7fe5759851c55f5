"""Saves of one rank of TensorRT-LLM's connector: what is read from the engine's blocks, and when."""
