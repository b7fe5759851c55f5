"""Tests of shared memory between daemons of one host."""
