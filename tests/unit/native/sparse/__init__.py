"""Summaries of blocks, and recall by them."""
