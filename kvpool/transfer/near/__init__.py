"""Chunks of other daemons on this host: copied out of their shared memory, without a stream between them."""
