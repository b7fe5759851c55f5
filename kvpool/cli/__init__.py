"""The commands `kvpoold` and `kvpoolctl`."""
