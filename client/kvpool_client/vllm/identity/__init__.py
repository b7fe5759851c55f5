"""Identity of the KV: the model, and its geometry."""
