"""Prompts of any layout, for a test: saved and loaded by a Pool, with bytes that derive from each chunk's own key.

Of a Pool with a share these are the bytes of its extents alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.key_column import KeyColumn
from tests.rigs.layouts import Case
from tests.rigs.payload import Bytes, chunk_bytes_of, tokens_of

CHUNKS = 6


def prompt(pool: kv.Pool, seed: int, chunks: int = CHUNKS, *, tail: int = 1) -> kv.KeyChain:
    """The keys of a prompt of so many chunks, and `tail` tokens behind them."""
    return pool.keys(tokens_of(seed, chunks * pool.layout.chunk_tokens + tail))


def key_of(keys: kv.KeyChain, group: int, chunk: int) -> bytes:
    """The key of one group's chunk."""
    return KeyColumn(keys.columns()[group])[chunk]


def rows_of(pool: kv.Pool, keys: kv.KeyChain, chosen: Sequence[Sequence[int]]) -> list[Bytes]:
    """The bytes that the chosen chunks of each group must have, [chunks, bytes]."""
    found = []
    for group, (part, share, chunks) in enumerate(zip(pool.layout.group_layouts, pool.shares, chosen, strict=True)):
        whole = [chunk_bytes_of(key_of(keys, group, chunk), part.chunk_bytes) for chunk in chunks]
        rows = np.stack(whole) if whole else np.empty((0, part.chunk_bytes), np.uint8)
        extents = rows.reshape(len(rows), part.kv_extents, part.payload_bytes)[:, list(share.extents(part))]
        found.append(np.ascontiguousarray(extents.reshape(len(rows), share.of_layout(part).chunk_bytes)))
    return found


def as_given(pool: kv.Pool, by_group: Sequence[Any]) -> Any:
    """What a verb takes for things of each group: the one thing itself of a layout without groups."""
    return by_group if pool.layout.groups else by_group[0]


def begin(
    pool: kv.Pool,
    keys: kv.KeyChain,
    boundaries: Sequence[int] | None = None,
    *,
    chunks: int | None = None,
    chosen: Sequence[Sequence[int]] | None = None,
    first: int = 0,
) -> kv.Save:
    """A save of chunks from `first` on, with windows and states at these boundaries; `chosen`: of these of each group."""
    if chosen is not None:
        return pool.save(keys, from_=as_given(pool, rows_of(pool, keys, chosen)), chosen=chosen)
    rows = rows_of(pool, keys, pool.chunks_to_save(keys, first, chunks, boundaries))
    return pool.save(keys, from_=as_given(pool, rows), boundaries=boundaries, chunks=chunks, first_chunk=first)


def store(pool: kv.Pool, keys: kv.KeyChain, *arguments: Any, **named: Any) -> kv.SaveResult:
    """The same, published."""
    return begin(pool, keys, *arguments, **named).commit()


def room_for(pool: kv.Pool, lease: kv.Lease, first: int = 0) -> list[Bytes]:
    """Zeros for what a load from chunk `first` on brings of each group."""
    rows = zip(lease.hold.rows_from(first), pool.layout.group_layouts, pool.shares, strict=True)
    return [np.zeros((len(row), share.of_layout(part).chunk_bytes), np.uint8) for row, part, share in rows]


def begin_load(pool: kv.Pool, lease: kv.Lease, first: int = 0) -> tuple[kv.Load, list[Bytes]]:
    """A load of a lease's chunks from `first` on, and where they go."""
    into = room_for(pool, lease, first)
    return pool.load(lease, into=as_given(pool, into), first_chunk=first), into


def load(pool: kv.Pool, lease: kv.Lease, first: int = 0) -> tuple[kv.LoadResult, list[Bytes]]:
    """The same, ended: the result and the bytes by group."""
    begun, into = begin_load(pool, lease, first)
    return begun.wait(), into


def whole_result(layout: kv.Layout, chunks: int) -> kv.LoadResult:
    """The result of a load that brings so many chunks of every group."""
    whole = kv.LoadResult(chunks, chunks * layout.chunk_tokens, "complete")
    return replace(whole, groups=(whole,) * len(layout.groups))


def assert_loads(pool: kv.Pool, keys: kv.KeyChain, lease: kv.Lease) -> None:
    """A load brings the right bytes of all that a lease has."""
    result, found = load(pool, lease)
    assert result == whole_result(pool.layout, lease.chunks)
    for right, here in zip(rows_of(pool, keys, lease.ranges), found, strict=True):
        assert np.array_equal(right, here)


def assert_hit_served(pool: kv.Pool, keys: kv.KeyChain, hit: kv.Hit) -> None:
    """The right bytes of all that a lookup has found are leased and loaded."""
    with pool.acquire(hit) as lease:
        assert lease.chunks == hit.chunks
        assert_loads(pool, keys, lease)


def assert_served(pool: kv.Pool, keys: kv.KeyChain, chunks: int) -> None:
    """A lookup finds so many chunks, which are leased and loaded."""
    hit = pool.lookup(keys)
    assert hit.chunks == chunks
    assert_hit_served(pool, keys, hit)


def flip(lease: kv.Lease, row: int, byte: int = 5) -> None:
    """Flip a bit of a leased chunk in DRAM."""
    assert lease.hold.session is not None
    lease.hold.session.arena.view()[int(lease.hold.rows.offsets[row]) + byte] ^= 1


def row_of(lease: kv.Lease, group: int, chunk: int) -> int:
    """The row of a lease that a group's chunk is in."""
    return sum(len(before) for before in lease.ranges[:group]) + lease.ranges[group].index(chunk)


class Ranks:
    """The ranks of an engine that store chunks together, as a row of the table has them: `first` is one of them."""

    def __init__(self, case: Case, connect: Callable[..., kv.Pool]) -> None:
        self.case, self.layout = case, case.layout
        self.pools = [connect(case.layout, share=share) for share in case.shares]
        self.first = self.pools[0]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pool in self.pools:
            pool.close()

    def prompt(self, seed: int, chunks: int = CHUNKS) -> kv.KeyChain:
        """The keys of a prompt of so many chunks."""
        return prompt(self.first, seed, chunks)

    def begin(self, keys: kv.KeyChain, *arguments: Any, **named: Any) -> list[kv.Save]:
        """A save of each rank's part."""
        return [begin(pool, keys, *arguments, **named) for pool in self.pools]

    def store(self, keys: kv.KeyChain, *arguments: Any, **named: Any) -> int:
        """Save all parts of a prompt, one behind the other, of which nothing is declined: how many chunks were stored."""
        results = [save.commit() for save in self.begin(keys, *arguments, **named)]
        assert [(result.declined, dict(result.reasons)) for result in results] == [(0, {})] * len(results)
        assert all(result.stored == 0 for result in results[:-1])
        return results[-1].stored

    def needed(self, keys: kv.KeyChain, *arguments: Any, **named: Any) -> int:
        """How many chunks of all groups such a save has."""
        return sum(map(len, self.first.chunks_to_save(keys, *arguments, **named)))

    def assert_served(self, keys: kv.KeyChain, chunks: int = CHUNKS) -> None:
        """Every rank finds so many chunks, and loads its part of them."""
        for pool in self.pools:
            assert_served(pool, keys, chunks)
