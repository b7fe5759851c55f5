"""Prefix tree of computed blocks, and the order in which its leaves are evicted."""
