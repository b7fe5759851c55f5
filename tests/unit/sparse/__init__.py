"""Tests of sparse sequences' parts."""
