"""Parts of `kvpoolctl simulate`: its capacities, and its options, rows and picture for many nodes."""
