"""Readers of events and metrics that others wrote, in environments of their own: see `make test-routers`."""
