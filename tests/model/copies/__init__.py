"""Models of pools with copies of chunks in device memory."""
