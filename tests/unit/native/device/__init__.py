"""Devices, copies on them, and the directory of what they hold."""
