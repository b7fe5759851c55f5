"""Tests of keepers."""
