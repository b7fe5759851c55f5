"""KV cache events as routers read them: formats, block hashes, the order of a snapshot."""
