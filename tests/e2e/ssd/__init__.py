"""Tests of ssd."""
