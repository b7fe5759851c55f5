"""Parts of `kvpoolctl simulate`: its options, rows and document."""
