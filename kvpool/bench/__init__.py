"""The benchmarks of `kvpoolctl bench`, one file a measurement."""
