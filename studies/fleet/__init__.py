"""Simulation of many nodes: simulated nodes behind a router's model, with peers and a shared store between them."""
