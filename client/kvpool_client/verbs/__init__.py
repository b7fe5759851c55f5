"""Verbs of a Pool: finding, leasing, loading and saving chunks, and hints about them."""
