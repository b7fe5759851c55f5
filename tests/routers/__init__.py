"""Readers of the event stream that others wrote, in environments of their own: see `make test-routers`."""
