"""The records that travel over the local socket."""
