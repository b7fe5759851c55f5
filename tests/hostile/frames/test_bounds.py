"""Bounds on what one client may take: refused by name beyond them, and without cost for others."""

import contextlib
import struct
import time
from collections.abc import Callable

import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.index.namespaces import NAMESPACES_MAX
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.daemon_watch import assert_never_internal
from tests.hostile.rigs.raw_clients import engine, hello_of, keys_of, raw_engine, read_back, reserve, store
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.dropping import drop_leases, drop_reservations

TINY = kv.Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=1, planes=1)


def test_leases_reservations_and_tickets_of_a_connection_are_bounded(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__max_leases="5", server__max_reservations="3")
    with engine(daemon) as hostile, engine(daemon) as good:
        store(good, keys_of(0, 2))
        leases = [hostile.call(m.Acquire(keys_of(0, 2)), m.Leased).lease for _ in range(5)]
        for request in (m.Acquire(keys_of(0, 2)), m.Claim(hostile.call(m.IssueTicket(leases[0]), m.Ticket).ticket)):
            with pytest.raises(Refused, match="max_leases = 5"):
                hostile.call(request, m.Leased)
        made = [reserve(hostile, keys_of(10 + number, 1)) for number in range(3)]
        with pytest.raises(Refused, match="max_reservations = 3"):
            reserve(hostile, keys_of(20, 1))
        assert read_back(good, keys_of(0, 2)) == [True, True]
        store(good, keys_of(30, 2))
        drop_leases(hostile, leases[0])
        assert hostile.call(m.Acquire(keys_of(0, 2)), m.Leased).chunks == 2
        drop_reservations(hostile, made[0].reservation)
        assert reserve(hostile, keys_of(20, 1)).reservation
    assert_never_internal(daemon)


def test_columns_as_large_as_a_frame_are_served(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity="256MiB", dram__prefault="false", server__max_chain_chunks=str(m.KEYS_MAX))
    keys = keys_of(0, m.KEYS_MAX)
    with engine(daemon, TINY, "long") as hostile, engine(daemon) as good:
        store(good, keys_of(100_000, 3))
        made = reserve(hostile, keys)
        reserved = made.states.count(SaveState.RESERVED)
        assert reserved > 20_000
        states = hostile.call(m.Commit(made.reservation, bytes(4 * reserved), b""), m.Committed).states
        assert set(states) == {SaveState.STORED}
        begun_s = time.perf_counter()
        leased = hostile.call(m.Acquire(keys), m.Leased)
        assert leased.chunks == reserved
        print(f"acquire of {reserved} chunks took {(time.perf_counter() - begun_s) * 1e3:.1f} ms")
        assert read_back(good, keys_of(100_000, 3)) == [True] * 3
    assert_never_internal(daemon)


def test_leaves_of_all_groups_together_stand_for_as_many_chunks_as_one_answer_may_have(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(dram__capacity="32MiB", dram__prefault="false")
    groups = tuple(kv.Group(layers=1, kv_heads=1, head_dim=8 * heads, dtype="int8", planes=1) for heads in (1, 2))
    chunks = m.LEAF_CHUNKS_MAX // 2 + 1
    keys = [keys_of(0, chunks, seed=group) for group in (0, 1)]
    with engine(daemon, kv.Layout(chunk_tokens=1, groups=groups), "two chains") as hostile:
        for group in (0, 1):
            made = hostile.call(reserve_chain(b"", keys[group], group=group), m.Reserved)
            assert made.states == bytes([SaveState.RESERVED]) * chunks
            hostile.call(m.Commit(made.reservation, bytes(4 * chunks), b""), m.Committed)
        for count in (chunks, chunks - 1):
            leaves = b"".join(column[32 * (count - 1) : 32 * count] for column in keys)
            leased = hostile.call(m.Acquire(leaves, count), m.Leased)
            assert leased.chunks == (count if 2 * count <= m.LEAF_CHUNKS_MAX else 0)
        assert len(leased.tiers) == m.LEAF_CHUNKS_MAX
        assert hostile.call(m.Acquire(b"".join(keys), chunks), m.Leased).chunks == chunks
    assert_never_internal(daemon)


def _descending(first: int, count: int) -> bytes:
    """Keys that a liar chose so that the index has them in one long run of neighbours, the last one in front."""
    return b"".join(struct.pack("<4Q", 70_000 - number, number, 1, 1) for number in range(first, first + count))


@pytest.mark.timed
@pytest.mark.parametrize("keys_between", [keys_of, _descending], ids=["hashed", "descending"])
def test_dropping_a_long_chain_does_not_delay_the_daemon(
    start_daemon: Callable[..., Daemon], keys_between: Callable[[int, int], bytes]
) -> None:
    daemon = start_daemon(dram__capacity="256MiB", dram__prefault="false", server__max_chain_chunks="60000")
    with engine(daemon, TINY, "long") as hostile:
        parent, stored = b"", 0
        for first in range(0, 60_000, 20_000):
            keys = keys_between(first, 20_000)
            made = reserve(hostile, keys, parent)
            reserved = made.states.count(SaveState.RESERVED)
            hostile.call(m.Commit(made.reservation, b"\xff" * (4 * reserved), b""), m.Committed)
            parent, stored = keys[-32:], stored + reserved
        assert stored > 50_000
        leased = hostile.call(m.Acquire(keys_between(0, 1)), m.Leased)
        begun_s = time.perf_counter()
        hostile.call(m.ReportCorrupt(leased.lease, 0), m.Done)
        seconds = time.perf_counter() - begun_s
        print(f"{stored} chunks dropped in {seconds * 1e3:.0f} ms")
        assert seconds < 0.5
        assert daemon.stats()["dram.chunks"] == 0
    assert daemon.problems() == []


def test_namespaces_are_bounded_and_the_known_ones_are_still_served(daemon: Daemon) -> None:
    with engine(daemon) as good:
        store(good, keys_of(0, 3))
        wire = [*SMALL.to_wire()[:6], -1, 1000, "", 0]
        with contextlib.ExitStack() as stack:
            for number in range(4):
                wide = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "engine", f"model-{number}", wire)
                stack.enter_context(raw_engine(daemon, wide))
            for number in range(NAMESPACES_MAX - 4001):
                stack.enter_context(raw_engine(daemon, hello_of(model=f"single-{number}")))
            assert daemon.stats()["namespaces"] == NAMESPACES_MAX
            with pytest.raises(Refused, match=f"chunks of {NAMESPACES_MAX} models") as refusal:
                engine(daemon, model="one-more")
            assert refusal.value.code == "full"
        with engine(daemon, model="one-more"):  # unused ones make room
            assert daemon.stats()["namespaces"] < NAMESPACES_MAX
        with engine(daemon) as known:
            assert read_back(known, keys_of(0, 3)) == [True] * 3
    assert daemon.problems() == []


def test_size_classes_are_bounded_and_the_known_ones_are_still_served(daemon: Daemon) -> None:
    def layout(number: int) -> kv.Layout:
        return kv.Layout(layers=1 + number, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=4)

    with engine(daemon) as good:
        store(good, keys_of(0, 3))
        with contextlib.ExitStack() as stack:
            for number in range(63):
                stack.enter_context(engine(daemon, layout(10 + number), "many"))
            with pytest.raises(Refused, match="chunks of 64 sizes") as refusal:
                engine(daemon, layout(200), "many")
            assert refusal.value.code == "full"
        with engine(daemon, layout(10), "another model of a known size") as known:
            assert known.call(m.Acquire(keys_of(0, 3)), m.Leased).chunks == 0
        assert read_back(good, keys_of(0, 3)) == [True] * 3
    assert daemon.problems() == []
