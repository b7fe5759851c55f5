"""Bytes at rest, one module for each tier."""
