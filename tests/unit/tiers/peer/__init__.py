"""Tests of the peer tier."""
