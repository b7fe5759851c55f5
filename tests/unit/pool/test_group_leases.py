"""Leases over groups with thousands of holds, in one process: all of them are granted at once, and end in bounded parts."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.ids import KEY_BYTES, TICKET_BYTES, ConnectionId
from kvpool.index.leases import ENDED_AT_ONCE, ENDED_COST
from kvpool.index.parts import Step
from kvpool.layout import Layout
from kvpool.layouts.groups import Group
from kvpool.pool.pool import Pool
from kvpool.pool.readers import readers
from kvpool.pool.readers.hold_task import HoldTask, WaitingTasks
from kvpool.pool.readers.readers import NOTHING_TAKEN
from kvpool.pool.readers.runs import runs_of_hit
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.protocol.reserve_runs import reserve_chain
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_alone
from tests.rigs.runs.in_setting import in_setting

CHUNKS = 300
GEOMETRY = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "uint8", "planes": 1}
LAYOUT = Layout(
    chunk_tokens=16,
    rank=0,
    groups=(Group(**GEOMETRY), Group(kind="window", window=16 * CHUNKS, **GEOMETRY)),  # type: ignore[arg-type]  # by name
)
ZERO_SUM = kvpool_native.crc32c(np.zeros(LAYOUT.of_group(0).layer_bytes, np.uint8)).to_bytes(4, "little")
KEYS = np.random.default_rng(7).bytes(2 * CHUNKS * KEY_BYTES)
# Holds of one chunk that one turn ends.
AT_ONCE = -(-ENDED_AT_ONCE // (ENDED_COST + 1))


class Setting:
    """A pool with the chunks of a hit, and an engine."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.readers = pool, pool._readers
        self.session = pool.open_session(ConnectionId(7), "model", LAYOUT)
        full, windows = KEYS[: CHUNKS * KEY_BYTES], KEYS[CHUNKS * KEY_BYTES :]
        self.store(0, full)
        self.store(1, windows)

    def store(self, group: int, keys: bytes) -> None:
        request = reserve_alone(group, keys) if group else reserve_chain(b"", keys)
        made = served(self.pool.chains.reserve(self.session, request))
        sums = ZERO_SUM * (len(keys) // KEY_BYTES)
        served(self.pool.chains.commit(self.session, m.Commit(made.reservation, sums, b"")))

    @property
    def holds(self) -> int:
        """In the directory."""
        return int(self.pool.measure({}).directory["holds"])

    def take(self) -> HoldTask:
        """All holds, of no lease yet."""
        task = self.readers.begin_task(self.session, runs_of_hit(self.session, KEYS, CHUNKS), chunks=CHUNKS)
        while task.advance(1) is Step.MORE:
            pass
        assert len(task.holds) == 1 + CHUNKS
        return task

    def lease(self) -> m.Leased:
        grant = self.readers.grant(self.session, self.readers.take_holds(self.session, self.take()), 1)
        assert (grant.chunks, len(grant.tiers)) == (CHUNKS, 2 * CHUNKS)
        return grant

    async def assert_ends_in_parts(self, end: Callable[[], object], left: int = 0, *, parts: int = 0) -> None:
        """No turn ends more holds than one may, and `left` are left when all have ended, after so many parts at least."""
        before = self.holds
        end()
        turns = 0
        while self.readers.has_backlog:
            assert before - self.holds <= AT_ONCE
            before = self.holds
            self.readers.expire(1)
            turns += 1
        assert self.holds == left
        assert turns >= parts
        assert self.pool.verify()["problems"] == []


@asynccontextmanager
async def setting() -> AsyncIterator[Setting]:
    wanted = ["dram.capacity=16MiB", "dram.prefault=false", "dram.connection_quota=1.0", "dram.announced_quota=1.0"]
    pool = Pool(load_config(None, wanted), MonotonicClock())
    await pool.start()
    rig = Setting(pool)
    yield rig
    pool.drop_connection(rig.session.connection)
    assert await pool.stop()


in_pool = in_setting(setting)


@pytest.mark.parametrize("how", ["given up", "released", "dropped", "claimed", "announced"])
@in_pool
async def test_thousands_of_holds_end_in_parts(rig: Setting, how: str) -> None:
    if how == "given up":
        task = rig.take()
        await rig.assert_ends_in_parts(lambda: task.release_holds(1), parts=CHUNKS // AT_ONCE)
    elif how == "released":
        lease = rig.lease().lease
        await rig.assert_ends_in_parts(lambda: rig.readers.release(rig.session, lease, 1))
    elif how == "dropped":
        rig.lease()
        await rig.assert_ends_in_parts(lambda: rig.readers.drop_owner(rig.session.connection, 1))
    elif how == "claimed":
        ticket = rig.readers.issue_ticket(rig.session, rig.lease().lease, 1)
        rig.readers.drop_owner(rig.session.connection, 1)
        while rig.readers.has_backlog:
            rig.readers.expire(1)
        made = rig.holds
        claimed = rig.readers.claim(rig.session, ticket, 1)
        assert claimed.chunks == CHUNKS
        assert rig.holds >= 2 * made - AT_ONCE
        await rig.assert_ends_in_parts(lambda: None, left=made)
    else:
        request = m.Announce(KEYS, CHUNKS)
        assert served(rig.pool.hints.announce(rig.session, request)) == m.Announced(CHUNKS, 0)
        await rig.assert_ends_in_parts(
            lambda: rig.pool.hints.drop_owner(rig.session.connection), parts=CHUNKS // AT_ONCE
        )


@in_pool
async def test_a_lease_is_read_row_by_row_and_a_chunk_that_is_dropped_ends_it(rig: Setting) -> None:
    lease = rig.readers.find(rig.session, rig.lease().lease)
    assert lease is not None
    for row in (0, 1, CHUNKS - 1, CHUNKS, 2 * CHUNKS - 1):
        found = rig.readers.find_row(rig.session, lease, row)
        assert found is not None
        hold, chunk, layout = found
        assert rig.pool._directory.key_of(hold, chunk) == KEYS[row * KEY_BYTES : (row + 1) * KEY_BYTES]
        assert layout == LAYOUT.of_group(row // CHUNKS)
    assert rig.readers.find_row(rig.session, lease, 2 * CHUNKS) is None
    assert rig.readers.find_row(rig.session, lease, -1) is None
    task = rig.take()
    key = KEYS[-KEY_BYTES:]
    place = rig.pool._directory.place_of(key)
    assert place is not None
    assert rig.pool._directory.drop(key, place[1])
    assert task.chunks == 0
    assert rig.readers.take_holds(rig.session, task) == NOTHING_TAKEN
    task.release_holds(1)


@in_pool
async def test_a_promise_has_no_more_tickets_than_may_end_at_once(rig: Setting) -> None:
    most = 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "TICKETS_HOLDS_MAX", 2 * most + 1)  # a hold of each group
        for tickets, chunks in ((most + 1, 0), (most, CHUNKS)):
            promised = served(rig.pool.leases.promise(rig.session, pr.Promise(KEYS, CHUNKS, "", tickets, 0)))
            assert (promised.chunks, len(promised.tickets)) == (chunks, tickets * TICKET_BYTES if chunks else 0)
    rig.readers.end_tickets([promised.tickets[:TICKET_BYTES]], 1)


@in_pool
async def test_the_last_key_of_a_full_group_stands_for_its_chain(rig: Setting) -> None:
    leaf, windows = KEYS[(CHUNKS - 1) * KEY_BYTES : CHUNKS * KEY_BYTES], KEYS[CHUNKS * KEY_BYTES :]
    whole = served(rig.pool.chains.acquire(rig.session, m.Acquire(KEYS, CHUNKS)))
    named = served(rig.pool.chains.acquire(rig.session, m.Acquire(leaf + windows, CHUNKS)))
    assert (named.chunks, named.generations) == (CHUNKS, whole.generations)
    rig.pool._directory.drop(leaf, rig.pool._directory.place_of(leaf)[1])
    assert served(rig.pool.chains.acquire(rig.session, m.Acquire(leaf + windows, CHUNKS))).lease == 0


class OneChain:
    """A run of one chain, of one rank."""

    ranks = 1

    def __len__(self) -> int:
        return 1


class WaitingTask(HoldTask):
    """A task for which there is no room; some of what it needs is held."""

    is_held = False

    def _advance(self, now_ns: int) -> Step:
        self.is_held = True
        return Step.WAIT

    def _release(self, now_ns: int) -> None:
        self.is_held = False


def test_of_the_tasks_that_wait_only_the_first_keeps_its_holds() -> None:
    """Were each to keep what it has while it waits, hardly any of them would get all of it."""
    waiting: WaitingTasks = {}
    nothing: Any = SimpleNamespace(groups=("a group",))
    run: Any = OneChain()
    tasks = [
        WaitingTask(nothing, nothing, nothing, [run], holder=None, ending=nothing, chunks=1, waiting=waiting)
        for _ in range(3)
    ]
    every = list(tasks)

    def held_after_an_advance() -> list[bool]:
        for task in tasks:
            assert task.advance(0) is Step.WAIT
        return [task.is_held for task in every]

    assert held_after_an_advance() == [True, False, False]
    assert held_after_an_advance() == [True, False, False]
    tasks.pop(0).release_holds(0)
    assert held_after_an_advance() == [False, True, False]
    tasks.pop().release_holds(0)
    assert held_after_an_advance() == [False, True, False]
