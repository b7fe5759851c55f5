"""Transfer: immutable jobs that move bytes, on a bounded pool of threads. Independent of tiers and keys."""
