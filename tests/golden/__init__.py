"""Bytes that a release has promised: a change of one is a change of its format, with version, document and changelog."""
