"""Tests of the block pool over a real daemon."""
