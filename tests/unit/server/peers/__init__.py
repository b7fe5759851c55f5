"""Tests of serving other nodes."""
