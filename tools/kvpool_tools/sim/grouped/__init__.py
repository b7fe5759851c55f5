"""Simulation of layouts with groups: full layers beside layers with a window."""
