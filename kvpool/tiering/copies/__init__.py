"""Copies of the arena's chunks in a tier above it: which ones, and how they get there."""
