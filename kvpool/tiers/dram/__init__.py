"""DRAM tier: an arena in shared memory."""
