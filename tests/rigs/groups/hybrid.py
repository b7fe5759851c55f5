"""A hybrid model's prompts for a test: saved and loaded by group, with bytes that derive from each group's own keys."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import kvpool_client as kv
from kvpool.key_column import KeyColumn
from tests.rigs.payload import Bytes, chunk_bytes_of

CHUNK = 32
WINDOW_CHUNKS = 2
FULL, WINDOW, STATE = range(3)
HYBRID = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=2, kv_heads=2, head_dim=16, dtype="float16"),
        kv.Group(kind="window", window=CHUNK * WINDOW_CHUNKS - 5, layers=6, kv_heads=1, head_dim=16, dtype="float16"),
        kv.Group(kind="state", layers=3, state_bytes=CHUNK * 24),
    ),
)


def key_of(keys: kv.KeyChain, group: int, chunk: int) -> bytes:
    """The key of one group's chunk."""
    return KeyColumn(keys.columns()[group])[chunk]


def payloads(keys: kv.KeyChain, layout: kv.Layout, chosen: Sequence[Sequence[int]]) -> list[Bytes]:
    """The bytes that the chosen chunks of each group must have, [chunks, chunk_bytes]."""
    found = []
    for group, (part, chunks) in enumerate(zip(layout.group_layouts, chosen, strict=True)):
        rows = [chunk_bytes_of(key_of(keys, group, chunk), part.chunk_bytes) for chunk in chunks]
        found.append(np.stack(rows) if rows else np.empty((0, part.chunk_bytes), np.uint8))
    return found


def begin_store(
    pool: kv.Pool,
    keys: kv.KeyChain,
    boundaries: Sequence[int] | None = None,
    *,
    chunks: int | None = None,
    group: int | None = None,
) -> kv.Save:
    """A save of the first chunks, with windows and states at these boundaries. `group`: of that one alone."""
    named = pool.chunks_to_save(keys, 0, chunks, boundaries)
    if group is not None:
        named = tuple(of_group if number == group else () for number, of_group in enumerate(named))
        return pool.save(keys, from_=payloads(keys, pool.layout, named), chosen=named)
    return pool.save(keys, from_=payloads(keys, pool.layout, named), boundaries=boundaries, chunks=chunks)


def store(
    pool: kv.Pool, keys: kv.KeyChain, boundaries: Sequence[int] | None = None, *, chunks: int | None = None
) -> kv.SaveResult:
    """The same, published."""
    return begin_store(pool, keys, boundaries, chunks=chunks).commit()


def load(pool: kv.Pool, lease: kv.Lease) -> tuple[kv.LoadResult, list[Bytes]]:
    """Load all that a lease has; the result and the bytes by group."""
    into = [
        np.zeros((len(chunks), part.chunk_bytes), np.uint8)
        for chunks, part in zip(lease.ranges, pool.layout.group_layouts, strict=True)
    ]
    return pool.load(lease, into=into).wait(), into


def whole_result(layout: kv.Layout, chunks: int) -> kv.LoadResult:
    """The result of a load that brings so many chunks of every group."""
    whole = kv.LoadResult(chunks, chunks * layout.chunk_tokens, "complete")
    return replace(whole, groups=(whole,) * len(layout.groups))


def assert_served(pool: kv.Pool, keys: kv.KeyChain, chunks: int) -> None:
    """A lookup finds so many chunks, and a load brings the right bytes of every group."""
    hit = pool.lookup(keys)
    assert hit.chunks == chunks
    assert_hit_served(pool, keys, hit)


def assert_hit_served(pool: kv.Pool, keys: kv.KeyChain, hit: kv.Hit) -> None:
    """A load brings the right bytes of every group of all that a lookup has found."""
    chunks = hit.chunks
    with pool.acquire(hit) as lease:
        assert lease.chunks == chunks
        result, found = load(pool, lease)
        assert result == whole_result(pool.layout, chunks)
        for right, here in zip(payloads(keys, pool.layout, lease.ranges), found, strict=True):
            assert np.array_equal(right, here)
