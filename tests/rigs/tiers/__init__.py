"""Tiers of tests, and pools that have them."""
