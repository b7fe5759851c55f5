"""Tests of life."""
