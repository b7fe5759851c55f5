"""Identity of the KV: the model, its geometry, the ranks that share it."""
