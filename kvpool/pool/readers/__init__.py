"""Verbs of readers: leases and tickets on stored chunks."""
