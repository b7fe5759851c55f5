"""The daemon's process: its local socket, health, metrics and events."""
