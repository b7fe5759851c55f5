"""Keepers of the daemon's memory, and the choice between them."""
