"""Tests of LMCache's plug-in."""
