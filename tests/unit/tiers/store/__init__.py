"""The store tier's parts."""
