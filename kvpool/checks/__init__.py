"""Checks: bytes compared with their checksums, and recounts of invariants."""
