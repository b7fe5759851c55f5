"""Tests of the block pool."""
