"""Daemons on a store that nodes share."""
