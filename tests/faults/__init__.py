"""Failures of processes: at named points, by kills, and by stops."""
