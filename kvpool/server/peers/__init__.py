"""Serving of other nodes: what they pull from this one."""
