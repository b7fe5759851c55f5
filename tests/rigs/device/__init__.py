"""Rigs of the device tier: a CUDA driver without a device."""
