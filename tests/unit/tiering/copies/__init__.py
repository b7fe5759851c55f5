"""Tests of copies above the arena."""
