"""Weights that change in place: an epoch of its own for each set of them, which is part of every key.

vLLM says so with `reset_cache`, and does not say what the new weights are. So an epoch is a number that nobody else has: an
engine that was reset shares with none until it is started again, when its weights have a name. Before the first reset keys are
as they would be without. Pure but for the number; any thread.
"""

import secrets

import kvpool_native

EPOCH_BYTES = 16
FIRST_EPOCH = b""


def new_epoch() -> bytes:
    """An epoch that no engine had or will have."""
    return secrets.token_bytes(EPOCH_BYTES)


def hash_in_epoch(epoch: bytes, block_hash: bytes) -> bytes:
    """What stands for an engine's block hash in an epoch."""
    return kvpool_native.blake3(epoch + block_hash) if epoch else block_hash
