"""Prompts beyond `server.max_chain_chunks`: what fits is stored and found, the rest is declined by name and computed again."""

from collections.abc import Callable

import numpy as np

import kvpool_client as kv
from tests.rigs.daemon import Daemon

LAYOUT = kv.Layout(layers=2, planes=1, kv_heads=1, head_dim=64, dtype="uint8", chunk_tokens=16)
CHUNKS_MAX = 8


def test_chunks_beyond_the_longest_chain_are_declined(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__max_chain_chunks=str(CHUNKS_MAX))
    with daemon.connect(LAYOUT) as pool:
        keys = pool.keys(np.arange(20 * LAYOUT.chunk_tokens, dtype=np.int32))
        rows = np.ones((20, LAYOUT.chunk_bytes), np.uint8)
        result = pool.save(keys, from_=rows).commit()
        assert (result.stored, result.present, result.declined) == (CHUNKS_MAX, 0, 20 - CHUNKS_MAX)
        assert result.reasons == {"too-long": 20 - CHUNKS_MAX}
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS_MAX
        assert pool.save(keys, from_=rows).commit().present == CHUNKS_MAX
    assert daemon.problems() == []
