"""Rigs of layouts with groups."""
