"""The daemon's health: what it sees of itself, and whom it notifies."""
