"""Hostile and broken clients against the decoder and a live daemon. KVPOOL_CAMPAIGN=1 runs the whole counts."""
