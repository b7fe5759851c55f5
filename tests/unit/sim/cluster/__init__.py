"""Tests of sim.cluster."""
