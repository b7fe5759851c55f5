"""Rigs of transports."""
