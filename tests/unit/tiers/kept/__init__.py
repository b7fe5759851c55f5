"""Tests of kept memory."""
