"""What the adapters of all engines share."""
