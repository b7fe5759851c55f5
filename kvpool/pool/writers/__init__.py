"""Verbs of writers: reservations, commits, saves by copy."""
