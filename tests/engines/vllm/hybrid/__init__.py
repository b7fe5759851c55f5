"""Hybrid models on the real engine."""
