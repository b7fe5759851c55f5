"""Operators' tools: `kvpoolctl` with its benchmarks, and the simulator that sizes a pool. The daemon imports none of it."""
