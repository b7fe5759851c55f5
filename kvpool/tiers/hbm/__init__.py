"""Device tier: copies of chunks in the memory of a GPU."""
