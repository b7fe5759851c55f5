"""Tests of sglang."""
