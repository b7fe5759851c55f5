"""Saves by copy inside a pool, with transfer threads that run on command: who owns the slots until a copy has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.config.config import load_config
from kvpool.errors import ProtocolError, Refused
from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from kvpool.transfer.workers import Job, Report
from tests.rigs.clock import HandClock
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import HYBRID, WINDOW
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_alone
from tests.rigs.runs.in_setting import in_setting

KEYS = b"".join(bytes([number]) * 32 for number in (1, 2))
SECOND_NS = 1_000_000_000


class HeldWorkers:
    """Jobs wait until `run` is called. Stands where `Workers` does."""

    waiting = 0
    is_healthy = True

    def __init__(self, *_: object, **__: object) -> None:
        self.jobs: list[tuple[Job, Report]] = []
        self.has_room = True

    def submit(self, job: Job, done: Report) -> bool:
        if self.has_room:
            self.jobs.append((job, done))
        return self.has_room

    async def run(self) -> None:
        """Every job, and what the event loop does about it."""
        for job, done in self.jobs:
            done(job())
        self.jobs.clear()
        for _ in range(3):
            await asyncio.sleep(0)

    def stop(self) -> None:
        """Nothing runs."""


class Setting:
    """A pool in copy mode, and an engine with both chunks reserved and their bytes in staging."""

    def __init__(self) -> None:
        options = ("server.write_mode=copy", "server.staging=128KiB", "server.reservation_ttl=1s")
        self.clock = HandClock()
        self.pool = Pool(load_config(None, [*options, "dram.capacity=1MiB", "dram.prefault=false"]), self.clock)
        workers = self.pool._workers
        assert isinstance(workers, HeldWorkers)
        self.workers = workers

    async def begin(self) -> None:
        await self.pool.start()
        self.session = self.pool.open_session(ConnectionId(7), "model", SMALL)
        answer, fd = self.pool.staged.open(self.session)
        self.staging = kvpool_native.Mapping.attach(fd, answer.memory_bytes, writable=True)
        self.staging.view()[:] = np.random.default_rng(1).integers(0, 256, self.staging.size, np.uint8)
        self.made = self.reserve(self.session)

    def reserve(self, session: EngineSession) -> m.Reserved:
        return served(self.pool.chains.reserve(session, reserve_chain(b"", KEYS)))

    def copy(self, first: int = 0, chunks: int = 2) -> "asyncio.Future[m.Done]":
        request = sm.CopyStaged(self.made.reservation, first, chunks, 0, SMALL.extents, first * SMALL.chunk_bytes)
        answer = self.pool.staged.copy(self.session, request)
        assert isinstance(answer, asyncio.Future)
        return answer

    def commit(self, chunks: int = 2) -> list[int]:
        starts = range(0, chunks * SMALL.chunk_bytes, SMALL.chunk_bytes)
        sums = (
            kvpool_native.extent_checksums(self.staging, start, SMALL.extent_bytes, SMALL.extents) for start in starts
        )
        request = m.Commit(self.made.reservation, b"".join(sums), b"")
        return list(served(self.pool.chains.commit(self.session, request)).states)

    def counts(self) -> tuple[int, int]:
        """Reservations and zombie slots."""
        measured = self.pool.measure({})
        return measured.index["reservations"], measured.directory["zombies"]


@contextlib.contextmanager
def held_workers() -> Iterator[None]:
    """Pools have them for their threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool.pool.pool.Workers", HeldWorkers)
        yield


@contextlib.asynccontextmanager
async def copying_setting() -> AsyncIterator[Setting]:
    with held_workers():
        setting = Setting()
        await setting.begin()
        try:
            yield setting
            assert setting.pool.verify()["problems"] == []
        finally:
            await setting.pool.stop()


in_copying_setting = in_setting(copying_setting)


@in_copying_setting
async def test_completely_copied_chunks_are_stored(setting: Setting) -> None:
    answer = setting.copy()
    assert not answer.done()
    await setting.workers.run()
    assert answer.result() == m.Done()
    assert setting.commit() == [SaveState.STORED] * 2
    assert setting.counts() == (0, 0)


@in_copying_setting
async def test_slots_wait_for_a_copy_into_them_after_their_connection_has_ended(setting: Setting) -> None:
    answer = setting.copy()
    answer.cancel()
    setting.pool.drop_connection(setting.session.connection)
    assert setting.counts() == (1, 2)
    assert setting.pool.staged.stats()["staging_areas"] == 0
    other = setting.pool.open_session(ConnectionId(8), "model", SMALL)
    again = setting.reserve(other)
    assert set(again.states) == {SaveState.RESERVED}
    old = set(np.frombuffer(setting.made.offsets, "<u8").tolist())
    assert old.isdisjoint(np.frombuffer(again.offsets, "<u8").tolist())
    await setting.workers.run()
    assert setting.counts() == (1, 0)
    setting.pool.drop_connection(other.connection)
    assert setting.counts() == (0, 0)


@in_copying_setting
async def test_a_reservation_that_expires_under_a_copy_is_not_published(setting: Setting) -> None:
    setting.copy()
    setting.clock.ns += 2 * SECOND_NS
    await setting.workers.run()
    assert setting.commit() == [SaveState.EXPIRED] * 2
    assert setting.counts() == (1, 2)
    request = sm.CopyStaged(setting.made.reservation, 0, 2, 0, SMALL.extents, 0)
    assert setting.pool.staged.copy(setting.session, request) == m.Done()
    assert setting.workers.jobs == []
    served(setting.pool.chains.end_reservation(setting.session, setting.made.reservation))
    assert setting.counts() == (0, 0)


@in_copying_setting
async def test_nothing_is_published_while_a_copy_is_under_way(setting: Setting) -> None:
    setting.copy()
    await setting.workers.run()
    setting.copy(1, 1)
    with pytest.raises(ProtocolError, match="under way"):
        setting.commit()
    await setting.workers.run()
    assert setting.commit() == [SaveState.STORED] * 2


@in_copying_setting
async def test_a_copy_that_no_thread_can_take_is_refused_and_leaves_nothing(setting: Setting) -> None:
    setting.workers.has_room = False
    with pytest.raises(Refused, match="busy"):
        setting.copy()
    served(setting.pool.chains.end_reservation(setting.session, setting.made.reservation))
    assert setting.counts() == (0, 0)


@in_copying_setting
async def test_a_failed_copy_is_reported_and_counts_as_not_copied(setting: Setting) -> None:
    answer = setting.copy()
    [(_, done)] = setting.workers.jobs
    setting.workers.jobs.clear()
    done(OSError("no more"))
    with contextlib.suppress(OSError):
        await answer
    assert isinstance(answer.exception(), OSError)
    assert setting.commit() == [SaveState.CHECKSUM, SaveState.NO_PARENT]


@pytest.mark.parametrize("is_part", [False, True])
@in_copying_setting
async def test_a_chunk_without_a_parent_is_stored_beside_one_that_was_not_copied(
    setting: Setting, is_part: bool
) -> None:
    session = setting.pool.open_session(ConnectionId(8), "windows", HYBRID)
    window = session.of_group(WINDOW).layout
    share = kv.Share(0, window.layers // 2, 0, 1) if is_part else None
    numbers = range(window.extents) if share is None else share.extents(window)
    answer, fd = setting.pool.staged.open(session)
    staging = kvpool_native.Mapping.attach(fd, answer.memory_bytes, writable=True)
    keys = b"".join(bytes([number]) * 32 for number in (3, 4, 5))
    made = served(setting.pool.chains.reserve(session, reserve_alone(WINDOW, keys, share)))
    for chunk in (0, 2):
        setting.pool.staged.copy(session, sm.CopyStaged(made.reservation, chunk, 1, 0, len(numbers), 0))
    await setting.workers.run()
    zeros = kvpool_native.extent_checksums(staging, 0, window.extent_bytes, len(numbers))
    request = m.Commit(made.reservation, zeros * 3, b"")
    stored = SaveState.PART if is_part else SaveState.STORED
    assert list(served(setting.pool.chains.commit(session, request)).states) == [stored, SaveState.CHECKSUM, stored]
    again = served(setting.pool.chains.reserve(session, reserve_alone(WINDOW, keys, share)))
    assert again.states[1] == SaveState.RESERVED, "what was not copied may be saved again"
