"""Which KV this is: the model, its geometry, the ranks that share it."""
