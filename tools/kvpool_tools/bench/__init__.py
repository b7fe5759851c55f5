"""Benchmarks of `kvpoolctl bench`, one file a measurement."""
