"""Block hashes: 64-bit names of chunks for readers of blocks, and the blocks that a chunk is cut into.

A block's hash is the last eight bytes, big endian, of 32: of the chunk's key for its last block, and of a hash over key and
number for each one before. So the hash of the last block of a chunk is what the next chunk's first one follows, and the hashes
of a chunk can be published from its key alone when it is removed. They do not depend on tokens: routers hash those themselves.
Two chunks that begin with the same tokens share no hash, and the removal of one does not imply that of the other.

Pure functions; any thread.
"""

import numpy as np

import kvpool_native
from kvpool.key_column import KeyColumn


def block_hash(key: bytes) -> int:
    """The hash of a chunk as one block."""
    return int.from_bytes(key[-8:], "big")


def block_hashes(key: bytes, count: int) -> list[int]:
    """The hashes of the `count` blocks of a chunk, in order."""
    inner = [block_hash(kvpool_native.blake3(key + number.to_bytes(4, "little"))) for number in range(count - 1)]
    return [*inner, block_hash(key)]


def hashes_of(keys: KeyColumn, count: int) -> list[int]:
    """The hashes of the `count` blocks of each of several chunks, in order."""
    if count == 1 and keys:
        words = np.frombuffer(keys.packed, ">u8").reshape(len(keys), -1)
        hashes: list[int] = words[:, -1].tolist()
        return hashes
    return [block for key in keys for block in block_hashes(key, count)]


def blocks_of(chunk_tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` (0: none are wanted) a chunk is cut into; 1 where it is no whole number of them."""
    return chunk_tokens // block_tokens if block_tokens and chunk_tokens % block_tokens == 0 else 1
