"""Faults in one group of a layout: the hit is shorter or a miss, and never other bytes."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.types import SaveState
from tests.rigs.daemon import Daemon, in_both_write_modes, spawn, wait_until
from tests.rigs.groups.hybrid import CHUNK, FULL, HYBRID, STATE, WINDOW, assert_served, begin_store, key_of, load, store
from tests.rigs.payload import tokens_of

# Publishes of each prompt one group alone.
HALF_SAVED = """
import sys
import kvpool_client as kv
from tests.rigs.groups.hybrid import CHUNK, HYBRID, begin_store
from tests.rigs.payload import tokens_of

pool = kv.connect(sys.argv[1], model="test-model", layout=HYBRID, timeout_s=20.0)
for group in range(3):
    save = begin_store(pool, pool.keys(tokens_of(group, 6 * CHUNK + 1)), group=group)
    assert save.commit().groups[group].stored
print("half")
sys.stdin.read()
"""


def flush(daemon: Daemon) -> None:
    with daemon.admin() as operator:
        operator.flush("test-model", None)


def flip(lease: kv.Lease, row: int, byte: int) -> None:
    assert lease.hold.session is not None
    lease.hold.session.arena.view()[int(lease.hold.rows.offsets[row]) + byte] ^= 1


def test_what_was_evicted_between_lookup_and_acquire_shortens_the_lease(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 10 * CHUNK + 1))
        store(pool, keys, [4, 10])
        hit = pool.lookup(keys)
        assert hit.chunks == 10
        flush(daemon)
        with pool.acquire(hit) as lease:
            assert lease.chunks == 0
        store(pool, keys, [4])
        with pool.acquire(hit) as lease:
            assert lease.chunks == 4
            assert load(pool, lease)[0].chunks == 4
        wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has ended")
    assert daemon.problems() == []


@pytest.mark.parametrize("group", [FULL, WINDOW, STATE])
def test_a_flipped_bit_in_one_group_ends_the_load_and_drops_that_chunk(daemon: Daemon, group: int) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(2, 10 * CHUNK + 1))
        store(pool, keys, [4, 10])
        with pool.acquire(pool.lookup(keys)) as lease:
            row = sum(len(before) for before in lease.ranges[:group])
            flip(lease, row + len(lease.ranges[group]) - 1, 5)
            result, _ = load(pool, lease)
            assert (result.chunks, result.tokens, result.reason) == (0, 0, "checksum")
            ends = [(9, "checksum") if number == group else (10, "complete") for number in range(3)]
            assert [(each.chunks, each.reason) for each in result.groups] == ends
        assert_served(pool, keys, 4)  # the boundary before
        assert pool.lookup(keys).full_chunks == (9 if group == FULL else 10)
        assert daemon.stats()["checksum_failures"] == 1
        again = store(pool, keys, [4, 10])
        assert (again.stored, again.declined) == (1, 0)
        assert_served(pool, keys, 10)
    assert daemon.problems() == []


def test_a_client_that_is_killed_with_one_group_saved_leaves_a_miss(daemon: Daemon) -> None:
    with daemon.connect(HYBRID, timeout_s=20.0) as pool:
        prompts = [pool.keys(tokens_of(group, 6 * CHUNK + 1)) for group in (FULL, WINDOW, STATE)]
        with spawn(HALF_SAVED, daemon.socket) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "half\n"
            assert [pool.lookup(keys).chunks for keys in prompts] == [0, 0, 0]
            engine.kill()
        wait_until(lambda: daemon.stats()["reservations"] == 0, "what it has reserved is free")
        for keys, present in zip(prompts, ([6, 0, 0], [0, 2, 0], [0, 0, 1]), strict=True):
            again = store(pool, keys)
            assert [result.present for result in again.groups] == present
            assert again.declined == 0
            assert_served(pool, keys, 6)
    assert daemon.problems() == []


def test_a_group_that_finds_no_room_leaves_a_miss_and_the_others_whole(start_daemon: Callable[..., Daemon]) -> None:
    sizes = [part.stored_bytes for part in HYBRID.group_layouts]
    daemon = start_daemon(dram__capacity=f"{12 * sum(sizes)}B")
    with daemon.connect(HYBRID) as pool:
        held: list[kv.Lease] = []
        while True:  # until leases hold nearly all of DRAM
            keys = pool.keys(tokens_of(100 + len(held), 10 * CHUNK + 1))
            result = store(pool, keys)
            if result.declined:
                break
            held.append(pool.acquire(pool.lookup(keys)))
            assert held[-1].chunks == 10
            assert len(held) < 1000
        assert set(result.reasons) <= {"full", "no-parent", "quota"}
        assert {entry.declined == 0 for entry in result.groups} == {True, False}
        found = pool.lookup(keys)
        assert found.chunks == 0
        assert daemon.problems() == []
    with daemon.connect(HYBRID) as pool:
        wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended")
        keys = pool.keys(tokens_of(7, 10 * CHUNK + 1))
        assert store(pool, keys).declined == 0
        assert_served(pool, keys, 10)


@in_both_write_modes
def test_two_connections_save_one_prompt(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as one, daemon.connect(HYBRID) as other:
        tokens = tokens_of(3, 8 * CHUNK + 1)
        first, second = begin_store(one, one.keys(tokens)), begin_store(other, other.keys(tokens))
        late = second.commit()
        assert set(late.reasons) <= {SaveState.PENDING.reason, SaveState.NO_PARENT.reason}
        assert late.stored == 0
        assert other.lookup(other.keys(tokens)).chunks == 0
        assert first.commit().declined == 0
        assert_served(other, other.keys(tokens), 8)
        assert store(other, other.keys(tokens)).present == 8 + 2 + 1
    assert daemon.problems() == []


def test_an_aborted_save_stores_nothing_of_any_group(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(3, 8 * CHUNK + 1))
        with begin_store(pool, keys) as save:
            save.layer(0, WINDOW)
        assert save.commit().stored == 0
        assert pool.lookup(keys).full_chunks == 0
        wait_until(lambda: daemon.stats()["reservations"] == 0, "what it has reserved is free")
        store(pool, keys)
        assert_served(pool, keys, 8)


def test_a_restart_without_disk_is_a_miss_and_leases_end(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(4, 5 * CHUNK + 1))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        daemon.kill()
        daemon.start()
        wait_until(lambda: pool.connected, "the pool is connected again")
        result, _ = load(pool, lease)
        assert (result.chunks, [each.reason for each in (result, *result.groups)]) == (0, ["disconnected"] * 4)
        assert pool.lookup(keys).chunks == 0
        store(pool, keys)
        assert_served(pool, keys, 5)


def test_a_restart_serves_what_disk_has_and_half_a_boundary_is_none(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The headers of a window's chunk are wiped: with the catalogue lost it is not restored, and the boundary before serves."""
    ssd = tmp_path / "ssd"
    daemon = start_daemon(dram__capacity="4MiB", ssd__path=str(ssd), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(5, 10 * CHUNK + 1))
        assert store(pool, keys, [4, 10]).declined == 0
        wanted = key_of(keys, WINDOW, 8)
    for is_wiped in (False, True):
        assert daemon.stop() == 0
        if is_wiped:
            shutil.rmtree(ssd / "catalogue")
            assert wipe_headers(ssd, wanted) > 0
        daemon.start()
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        with daemon.connect(HYBRID) as pool:
            assert_served(pool, pool.keys(tokens_of(5, 10 * CHUNK + 1)), 4 if is_wiped else 10)
    assert daemon.problems() == []


def wipe_headers(ssd: Path, key: bytes) -> int:
    """Zero every header of a chunk's slots on disk. How many there were."""
    wiped = 0
    for file in ssd.glob("segment-*.kvs"):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), kvpool_native.SSD_HEADER_BYTES):
            page = bytes(content[at : at + kvpool_native.SSD_HEADER_BYTES])
            if page.startswith(b"KVPSLOT1") and key in page:
                content[at : at + len(page)] = bytes(len(page))
                wiped += 1
        file.write_bytes(content)
    return wiped


@pytest.mark.parametrize("steps", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_random_faults_never_bring_other_bytes(daemon: Daemon, seed: int, steps: int) -> None:
    """Saves at random boundaries, flushes and flipped bits: what a load claims is right in every group."""
    chance = random.Random(seed)
    with daemon.connect(HYBRID) as pool:
        chains = [pool.keys(tokens_of(chance.randrange(1 << 30), 8 * CHUNK + 1)) for _ in range(3)]
        for _ in range(steps):
            keys, act = chance.choice(chains), chance.random()
            end = chance.randrange(1, 9)
            boundaries = sorted(chance.sample(range(1, end + 1), chance.randrange(0, min(3, end) + 1)))
            if act < 0.45:
                store(pool, keys, boundaries, chunks=end)
            elif act < 0.5:
                flush(daemon)
            else:
                hit = pool.lookup(keys)
                with pool.acquire(hit) as lease:
                    if is_flipped := lease.chunks and chance.random() < 0.3:
                        flip(lease, chance.randrange(len(lease.hold.rows.offsets)), 3)
                    result, _ = load(pool, lease)
                    assert result.chunks == (0 if is_flipped else lease.chunks)
                    assert lease.chunks == hit.chunks
                if hit.chunks and not is_flipped:
                    assert_served(pool, keys, hit.chunks)
        wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["reservations"] == 0, "nothing is held")
    assert daemon.problems() == []


def test_a_full_check_names_the_group_and_layer_of_wrong_bytes(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(7, 4 * CHUNK + 1))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            window = pool.layout.of_group(WINDOW)
            first_of_window = len(lease.ranges[FULL])
            flip(lease, first_of_window, 4 * window.layer_bytes)
        assert any("bad checksum in window 59 group, layer 4" in line for line in daemon.problems(deep=True))


def test_a_chunk_asked_for_by_key_names_its_group(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool, daemon.admin() as admin:
        keys = pool.keys(tokens_of(8, 4 * CHUNK + 1))
        store(pool, keys)
        asked = [key_of(keys, group, 3) for group in (FULL, WINDOW, STATE)]
        assert [row["group"] for row in admin.chunk_history(asked)] == ["full", "window 59", "state"]
        flush(daemon)
        assert [row["group"] for row in admin.chunk_history(asked)] == ["full", "window 59", "state"]
