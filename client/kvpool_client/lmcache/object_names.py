"""Object names: the 32 bytes by which the pool knows an object of LMCache, made of its key.

LMCache's key has the hash of a chunk's prompt, which chains the tokens before it, and what else there are several of: the rank,
the group of layers, the user's salt. All of it is in the name; the model and what its bytes mean are in the namespace
(`object_stores`). So the objects of all ranks and users of a model that have one size are one set, leased by one request.

Pure but for reading the key's attributes; any thread.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvpool_native
from kvpool.key_column import KEY_BYTES
from kvpool_client.named_keys import Names

# Of a rank and group and a salt's length, so that no two keys are the same bytes.
_FIELDS = struct.Struct("<QQQ")


def names_of(keys: Sequence[Any]) -> Names:
    """The names of LMCache's ObjectKeys, uint8 [keys, 32], in their order."""
    scopes: dict[tuple[int, int, str], bytes] = {}
    parts = []
    for key in keys:
        scope = key.kv_rank, key.object_group_id, key.cache_salt
        prefix = scopes.get(scope)
        if prefix is None:
            salt = key.cache_salt.encode(errors="surrogatepass")
            prefix = scopes[scope] = _FIELDS.pack(key.kv_rank, key.object_group_id, len(salt)) + salt
        parts.append(prefix + key.chunk_hash)
    return np.frombuffer(kvpool_native.blake3_each(parts), np.uint8).reshape(len(parts), KEY_BYTES)


def by_chunk(keys: Sequence[Any]) -> list[int]:
    """The places of keys so that the objects of one chunk follow one another. LMCache names all chunks of one rank and group
    before those of the next, while a prefix is found as far as all of them have it: what is evicted first must be its end."""
    rows: dict[tuple[int, int, str], int] = {}
    chunks = []
    for key in keys:
        row = key.kv_rank, key.object_group_id, key.cache_salt
        chunks.append(rows.get(row, 0))
        rows[row] = chunks[-1] + 1
    return sorted(range(len(chunks)), key=chunks.__getitem__) if len(rows) > 1 else list(range(len(chunks)))
