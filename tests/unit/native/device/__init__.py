"""Devices, on the emulated driver."""
