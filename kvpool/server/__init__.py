"""The daemon's borders: the local socket and the process around it."""
