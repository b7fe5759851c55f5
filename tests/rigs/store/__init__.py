"""Stores that nodes share: a real one, and one of files."""
