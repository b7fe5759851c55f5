"""Tests of router events."""
