"""Bytes in motion: immutable jobs on a bounded pool of threads. Knows neither tiers nor keys."""
