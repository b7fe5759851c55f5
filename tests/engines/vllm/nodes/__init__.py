"""Tests of engines on several nodes."""
