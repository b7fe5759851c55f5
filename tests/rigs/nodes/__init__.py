"""Nodes of a fleet: their control plane, their pools, and what one believes of another."""
