"""A full arena: new data replaces old, leaves are evicted before parents, held chunks stay, no false promise is made."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.clock import Deadline
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.layouts import CHUNK, HYBRID, Case, over
from tests.rigs.payload import assert_right_bytes, load_all
from tests.rigs.prompts import CHUNKS, Ranks, assert_hit_served, assert_loads, assert_served, load, prompt, store

DRAM_CHUNKS = 24
CAPACITY = f"{DRAM_CHUNKS * SMALL.chunk_bytes}B"
Start = Callable[..., Daemon]


@in_both_write_modes
def test_new_data_replaces_the_least_recent_and_leaves_before_their_parents(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        chains = [prompt(pool, number, 8) for number in range(4)]
        for keys in chains:
            assert store(pool, keys).stored == 8
        assert [pool.lookup(keys).chunks for keys in chains] == [0, 8, 8, 8]
        stats = daemon.stats()
        assert (stats["dram.chunks"], stats["evicted_chunks"]) == (DRAM_CHUNKS, 8)
        assert stats["dram.used_bytes"] == DRAM_CHUNKS * SMALL.chunk_bytes
        for keys in chains[1:]:
            assert_served(pool, keys, 8)
        hit = pool.lookup(chains[1])
        store(pool, prompt(pool, 9, 5))
        assert pool.lookup(chains[1]).chunks == 3
        with pool.acquire(hit) as lease:
            assert (hit.chunks, lease.chunks) == (8, 3)
            assert_loads(pool, chains[1], lease)
    assert daemon.problems() == []


def test_a_save_into_an_arena_that_is_all_leased_is_declined(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        held, new = prompt(pool, 1, DRAM_CHUNKS), prompt(pool, 2, 3)
        store(pool, held)
        with pool.acquire(pool.lookup(held)) as lease:
            declined = store(pool, new)
            assert (declined.stored, dict(declined.reasons)) == (0, {"full": 1, "no-parent": 2})
            assert pool.lookup(new).chunks == 0
            assert_loads(pool, held, lease)
        assert store(pool, new).stored == 3
    assert daemon.problems() == []


@over("hybrid", "divided")
def test_a_group_that_finds_no_room_leaves_a_miss_and_the_others_whole(case: Case, start_daemon: Start) -> None:
    sizes = [part.stored_bytes for part in case.layout.group_layouts]
    daemon = start_daemon(dram__capacity=f"{12 * sum(sizes)}B")
    with daemon.connect(case.layout) as pool:
        held: list[kv.Lease] = []
        while True:  # until leases hold nearly all of DRAM
            keys = prompt(pool, 100 + len(held))
            result = store(pool, keys)
            if result.declined:
                break
            held.append(pool.acquire(pool.lookup(keys)))
            assert held[-1].chunks == CHUNKS
            assert len(held) < 1000
        assert set(result.reasons) <= {"full", "no-parent", "quota"}
        assert {entry.declined == 0 for entry in result.groups} == {True, False}
        assert pool.lookup(keys).chunks == 0
        assert daemon.problems() == []
    with Ranks(case, daemon.connect) as ranks:
        wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended")
        keys = ranks.prompt(7)
        ranks.store(keys)
        ranks.assert_served(keys)


@in_both_write_modes
def test_of_a_prompt_longer_than_the_arena_the_beginning_is_stored(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        store(pool, prompt(pool, 1, 5))
        keys = prompt(pool, 2, DRAM_CHUNKS + 7)
        assert store(pool, keys).states == ("stored",) * DRAM_CHUNKS + ("declined",) * 7
        assert pool.lookup(keys).chunks == DRAM_CHUNKS
    assert daemon.problems() == []


def test_a_chunk_larger_than_the_arena_is_refused_at_connect(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity="64KiB")
    layout = kv.Layout(layers=8, kv_heads=8, head_dim=128, chunk_tokens=64)
    with pytest.raises(kv.LayoutMismatch, match=r"dram\.capacity"):
        daemon.connect(layout)


def test_layouts_of_other_sizes_take_over_memory(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    large = kv.Layout(layers=4, kv_heads=4, head_dim=32, dtype="float16", chunk_tokens=64)
    with daemon.connect() as small_pool, daemon.connect(large) as large_pool, daemon.connect(HYBRID) as hybrid:
        small = prompt(small_pool, 1, 300)
        assert store(small_pool, small).stored > 100
        for pool in (large_pool, hybrid):
            big = prompt(pool, 2, 20)
            assert store(pool, big).declined == 0
            assert_served(pool, big, 20)
        loaded, into = load_all(small_pool, small)
        assert_right_bytes(small, SMALL, loaded, into)
    assert daemon.problems() == []


@over("plain", "hybrid")
def test_flush_drops_chunks_that_are_not_held(case: Case, daemon: Daemon) -> None:
    with daemon.connect(case.layout) as pool, daemon.connect(model="other") as other:
        held, free, kept = prompt(pool, 1, 3), prompt(pool, 2, 4), prompt(other, 3, 2)
        counts = [sum(map(len, pool.chunks_to_save(keys))) for keys in (held, free)]
        for owner, keys in ((pool, held), (pool, free), (other, kept)):
            store(owner, keys)
        lease = pool.acquire(pool.lookup(held))
        with daemon.admin() as admin:
            report = admin.flush("test-model", None)
            assert (report["chunks"], report["skipped"], report["durable"]) == (counts[1], counts[0], True)
            assert (pool.lookup(held).chunks, pool.lookup(free).chunks, other.lookup(kept).chunks) == (3, 0, 2)
            lease.release()
            assert admin.flush(None, 3600.0)["chunks"] == 0
            assert admin.flush(None, None)["chunks"] == counts[0] + 2
        assert daemon.stats()["dram.used_bytes"] == 0
        assert store(pool, held).stored == counts[0]
        assert_hit_served(pool, held, pool.lookup(held))
    assert daemon.problems() == []


LONG, LONG_WINDOW, PROMPTS = 60, 40, 8
# Within this time each of the leases must come, on any machine.
DEADLINE_S = 120.0


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_leases_that_wait_for_room_at_once_are_all_served(start_daemon: Start, tmp_path: Path, rounds: int) -> None:
    """Each needs a third of DRAM: they are served one after the other."""
    layout = kv.Layout(
        chunk_tokens=CHUNK,
        groups=(
            kv.Group(layers=2, kv_heads=2, head_dim=16, dtype="float16"),
            kv.Group(kind="window", window=CHUNK * LONG_WINDOW, layers=2, kv_heads=1, head_dim=16, dtype="float16"),
            kv.Group(kind="state", layers=1, state_bytes=CHUNK * 24),
        ),
    )
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__watermark": "1"}
    daemon = start_daemon(dram__capacity="8MiB", **ssd)
    with daemon.connect(layout, timeout_s=20.0) as pool, daemon.admin() as admin:
        for number in range(PROMPTS):
            assert store(pool, prompt(pool, number, LONG), [LONG]).declined == 0
        assert admin.demote_all(60.0)["left"] == 0
    daemon.stop()
    daemon = start_daemon(dram__capacity="1600KiB", **ssd)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    served = [0] * PROMPTS
    deadline = Deadline(DEADLINE_S)

    def ask(number: int) -> None:
        with daemon.connect(layout, timeout_s=20.0) as pool:
            keys = prompt(pool, number, LONG)
            while served[number] < rounds and not deadline.has_passed():
                with pool.acquire(pool.lookup(keys)) as lease:
                    if lease.chunks:
                        served[number] += load(pool, lease)[0].chunks == LONG

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == [rounds] * PROMPTS
    assert daemon.problems() == []
