"""Copies between engine memory and the pool: buffers, devices, staging."""
