"""A full arena: new data replaces old, leaves are evicted before parents, held chunks stay, no false promise is made."""

from collections.abc import Callable

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, store, tokens_of

CHUNKS = 24
CAPACITY = f"{CHUNKS * SMALL.chunk_bytes}B"


@in_both_write_modes
def test_new_data_replaces_the_least_recent(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        chains = [pool.keys(tokens_of(number, 8 * 32)) for number in range(4)]
        for keys in chains:
            assert store(pool, keys).stored == 8
        assert [pool.lookup(keys).chunks for keys in chains] == [0, 8, 8, 8]
        stats = daemon.stats()
        assert stats["dram.chunks"] == CHUNKS
        assert stats["dram.used_bytes"] == CHUNKS * SMALL.chunk_bytes
        assert stats["evicted_chunks"] == 8
        for keys in chains[1:]:
            result, into = load_all(pool, keys)
            assert result.chunks == 8
            assert_right_bytes(keys, SMALL, result, into)
    assert daemon.problems() == []


def test_leaves_are_evicted_before_their_parents(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * 32))
        store(pool, keys)
        store(pool, pool.keys(tokens_of(2, 5 * 32)))
        assert pool.lookup(keys).chunks == CHUNKS - 5


def test_a_hit_that_has_shrunk_is_leased_as_far_as_it_is_stored(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * 32))
        store(pool, keys)
        hit = pool.lookup(keys)
        store(pool, pool.keys(tokens_of(2, 5 * 32)))
        with pool.acquire(hit) as lease:
            assert (hit.chunks, lease.chunks) == (CHUNKS, CHUNKS - 5)
            into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
            assert_right_bytes(keys, SMALL, pool.load(lease, into=into).wait(), into)
    assert daemon.problems() == []


def test_a_save_into_an_arena_that_is_all_leased_is_declined(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        held = pool.keys(tokens_of(1, CHUNKS * 32))
        store(pool, held)
        new = pool.keys(tokens_of(2, 3 * 32))
        with pool.acquire(pool.lookup(held)) as lease:
            declined = store(pool, new)
            assert (declined.stored, declined.declined) == (0, 3)
            assert dict(declined.reasons) == {"full": 1, "no-parent": 2}
            assert pool.lookup(new).chunks == 0
            into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
            result = pool.load(lease, into=into).wait()
            assert result.chunks == CHUNKS
            assert_right_bytes(held, SMALL, result, into)
        assert store(pool, new).stored == 3
    assert daemon.problems() == []


@in_both_write_modes
def test_of_a_prompt_longer_than_the_arena_the_beginning_is_stored(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, 5 * 32)))
        keys = pool.keys(tokens_of(2, (CHUNKS + 7) * 32))
        result = store(pool, keys)
        assert (result.stored, result.declined) == (CHUNKS, 7)
        assert result.states == ("stored",) * CHUNKS + ("declined",) * 7
        assert pool.lookup(keys).chunks == CHUNKS
    assert daemon.problems() == []


def test_a_chunk_larger_than_the_arena_is_refused_at_connect(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity="64KiB")
    layout = kv.Layout(layers=8, kv_heads=8, head_dim=128, chunk_tokens=64)
    with pytest.raises(kv.LayoutMismatch, match=r"dram\.capacity"):
        daemon.connect(layout)


def test_layouts_of_other_sizes_take_over_memory(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    large = kv.Layout(layers=4, kv_heads=4, head_dim=32, dtype="float16", chunk_tokens=64)
    with daemon.connect() as small_pool, daemon.connect(large) as large_pool:
        small = small_pool.keys(tokens_of(1, 300 * 32))
        assert store(small_pool, small).stored > 100
        big = large_pool.keys(tokens_of(2, 20 * 64))
        assert store(large_pool, big).stored == 20
        result, into = load_all(large_pool, big)
        assert result.chunks == 20
        assert_right_bytes(big, large, result, into)
        result, into = load_all(small_pool, small)
        assert_right_bytes(small, SMALL, result, into)
    assert daemon.problems() == []


def test_flush_drops_chunks_that_are_not_held(daemon: Daemon) -> None:
    with daemon.connect() as pool, daemon.connect(model="other") as other:
        held, free = pool.keys(tokens_of(1, 3 * 32)), pool.keys(tokens_of(2, 4 * 32))
        kept = other.keys(tokens_of(3, 2 * 32))
        for owner, keys in ((pool, held), (pool, free), (other, kept)):
            store(owner, keys)
        lease = pool.acquire(pool.lookup(held))
        with daemon.admin() as admin:
            report = admin.flush("test-model", None)
        assert report == {"chunks": 4, "bytes": 4 * SMALL.chunk_bytes, "skipped": 3, "durable": True}
        assert (pool.lookup(held).chunks, pool.lookup(free).chunks, other.lookup(kept).chunks) == (3, 0, 2)
        lease.release()
        with daemon.admin() as admin:
            assert admin.flush(None, 3600.0)["chunks"] == 0
            assert admin.flush(None, None)["chunks"] == 5
        assert daemon.stats()["dram.used_bytes"] == 0
        assert store(pool, held).stored == 3
        assert payload_of(held, SMALL).shape == (3, SMALL.chunk_bytes)
    assert daemon.problems() == []
