"""The command `kvpoolctl`."""
