"""Tests of pool."""
