"""Verbs of a Pool whose layout has groups."""
