"""Claims of TensorRT-LLM's connector: what may be promised, and the host memory in which it waits for the ranks."""
