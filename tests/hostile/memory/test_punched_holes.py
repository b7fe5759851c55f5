"""A client that punches holes in the arena before, during and after demotions and promotions.

The memory is its to ruin; what lies on disk is not, nor what the daemon says of it.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.protocol.blocking import BlockingConnection
from tests.hostile.rigs.raw_clients import engine
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
CHUNKS = 5
TIMEOUT_S = 30.0
ROUNDS = 3
PAUSE_S = 0.002
# Chunks of 2 MiB in pieces of a MiB: what is much smaller goes by plain calls in any case.
LARGE = kv.Layout(layers=4, kv_heads=8, head_dim=64, dtype="float16", chunk_tokens=256)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with both tiers that demotes only on command."""
    options = {
        "ssd.path": str(tmp_path / "ssd"),
        "ssd.capacity": "256MiB",
        "dram.capacity": "64MiB",
        "ssd.watermark": "1",
    }
    with Daemon(tmp_path, **options) as daemon:
        wait_open(daemon)
        yield daemon


def wait_open(daemon: Daemon) -> None:
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")


def punch(hostile: BlockingConnection) -> None:
    """Give all pages of the arena back to the kernel."""
    assert LIBC.fallocate(hostile.fds[0], PUNCH_HOLE, 0, hostile.welcome.arena_bytes) == 0


def demote_all(daemon: Daemon) -> dict[str, Any]:
    with daemon.admin() as connection:
        return connection.demote_all(TIMEOUT_S)


def forget_dram(daemon: Daemon) -> None:
    """Empty DRAM. A load that meets a hole ends before its promotion does, and what has not landed is no chunk of DRAM yet."""

    def is_empty() -> bool:
        with daemon.admin() as connection:
            connection.flush(None, None, "dram")
        stats = daemon.stats()
        return bool(stats["dram.chunks"] == 0 and stats["ssd.promotions_under_way"] == 0)

    wait_until(is_empty, "nothing is in DRAM any more, or on its way there")


def restart(daemon: Daemon, pool: kv.Pool) -> None:
    daemon.kill()
    daemon.start()
    wait_open(daemon)
    wait_connected(pool)


def assert_all_right(pool: kv.Pool, keys: kv.KeyChain) -> None:
    result, into = load_all(pool, keys)
    assert result == kv.LoadResult(len(keys), keys.tokens, "complete")
    assert_right_bytes(keys, LARGE, result, into)


def test_no_good_copy_on_disk_is_dropped_for_a_hole_in_the_arena(tiered: Daemon) -> None:
    with tiered.connect(LARGE) as pool, engine(tiered) as hostile:
        keys = pool.keys(tokens_of(1, CHUNKS * LARGE.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        assert demote_all(tiered)["chunks"] == CHUNKS
        for _ in range(2):
            forget_dram(tiered)
            punch(hostile)
            assert_all_right(pool, keys)
        stats = tiered.stats()
        assert (stats["ssd.chunks"], stats["ssd.corrupt_chunks"], stats["ssd.io_distrusted"]) == (CHUNKS, 0, 0)
    assert tiered.problems() == []


def test_chunks_acknowledged_after_a_hole_are_right_after_a_restart(tiered: Daemon) -> None:
    with tiered.connect(LARGE) as pool, engine(tiered) as hostile:
        punch(hostile)
        keys = pool.keys(tokens_of(2, CHUNKS * LARGE.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        report = demote_all(tiered)
        assert (report["chunks"], report["left"]) == (CHUNKS, 0)
        restart(tiered, pool)
        assert_all_right(pool, keys)


def test_chunks_that_a_hole_has_damaged_in_memory_are_not_acknowledged(tiered: Daemon) -> None:
    with tiered.connect(LARGE) as pool, engine(tiered) as hostile:
        keys = pool.keys(tokens_of(3, CHUNKS * LARGE.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        punch(hostile)
        assert demote_all(tiered)["chunks"] == 0
        restart(tiered, pool)
        assert pool.lookup(keys).chunks == 0


def test_no_good_copy_on_disk_is_dropped_for_holes_made_while_it_is_read(tiered: Daemon) -> None:
    with tiered.connect(LARGE) as pool, engine(tiered) as hostile:
        keys = pool.keys(tokens_of(4, CHUNKS * LARGE.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        assert demote_all(tiered)["chunks"] == CHUNKS
        with punching(hostile):
            for _ in range(ROUNDS):
                forget_dram(tiered)
                load_all(pool, keys)
        stats = tiered.stats()
        assert (stats["ssd.chunks"], stats["ssd.io_distrusted"]) == (CHUNKS, 0), "no client can have the rings given up"
        forget_dram(tiered)
        assert_all_right(pool, keys)


def test_chunks_acknowledged_during_holes_are_right_after_a_restart(tiered: Daemon) -> None:
    with tiered.connect(LARGE) as pool, engine(tiered) as hostile:
        keys = [pool.keys(tokens_of(5 + number, LARGE.chunk_tokens)) for number in range(CHUNKS)]
        with punching(hostile):
            for one in keys:
                store(pool, one)
            acknowledged = demote_all(tiered)["chunks"]
        restart(tiered, pool)
        found = [one for one in keys if pool.lookup(one).chunks]
        assert len(found) >= acknowledged
        for one in found:
            assert_all_right(pool, one)


@contextmanager
def punching(hostile: BlockingConnection) -> Iterator[None]:
    """While a thread makes holes all the time."""
    is_over = threading.Event()

    def punch_on() -> None:
        while not is_over.wait(PAUSE_S):
            punch(hostile)

    thread = threading.Thread(target=punch_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
