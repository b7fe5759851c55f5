"""Hints about chunks: retention requests, announcements, orchestrators' envelopes."""
