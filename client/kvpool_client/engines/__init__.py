"""Parts that the adapters of all engines share."""
