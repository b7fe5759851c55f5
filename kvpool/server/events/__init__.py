"""The event publisher for routers, and requests about events."""
