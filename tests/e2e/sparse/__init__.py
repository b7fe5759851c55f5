"""Tests of sparse reading."""
