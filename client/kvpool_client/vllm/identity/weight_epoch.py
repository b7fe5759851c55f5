"""Weight epoch: one for each set of weights that is loaded in place, and a part of every key.

vLLM reports a change with `reset_cache`, and does not identify the new weights. So an epoch is a unique number: an engine that
was reset shares with no other until it restarts, when its weights have a name again. Before the first reset, keys have no
epoch. Pure but for the number; any thread.
"""

import secrets

import kvpool_native

EPOCH_BYTES = 16
FIRST_EPOCH = b""


def new_epoch() -> bytes:
    """An epoch that no engine had or will have."""
    return secrets.token_bytes(EPOCH_BYTES)


def hash_in_epoch(epoch: bytes, block_hash: bytes) -> bytes:
    """The replacement of an engine's block hash in an epoch."""
    return kvpool_native.blake3(epoch + block_hash) if epoch else block_hash
