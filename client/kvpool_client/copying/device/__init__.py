"""Engine memory on a CUDA device: its driver, streams, pinned host memory, loads and saves."""
