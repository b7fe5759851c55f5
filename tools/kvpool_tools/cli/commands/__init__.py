"""The commands of `kvpoolctl`, one file each."""
