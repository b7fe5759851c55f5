"""Kept memory: the arena outlives the daemon that made it."""
