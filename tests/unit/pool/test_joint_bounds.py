"""Bounds of joint saves: what one call does at most, what a chain keeps, and parts that the daemon copies itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.pool.writers import joint_chains, joint_saves
from kvpool.pool.writers.joint_saves import LIFE_TTLS
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.states import SaveState
from tests.rigs.joint_pool import (
    LAYOUT,
    TTL_NS,
    JointPool,
    PartSave,
    chain_of,
    in_joint_pool,
    joint_pool,
    payload,
)
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_share
from tests.rigs.runs.in_setting import in_setting
from tests.unit.pool.test_staged_saves import HeldWorkers, held_workers

LEFT, RIGHT = (kv.Share.of_rank(LAYOUT, rank, 2) for rank in range(2))
PART, STORED, EXPIRED = SaveState.PART, SaveState.STORED, SaveState.EXPIRED
LARGE = {"dram.capacity": "64MiB"}


def path_of(chunks: int, first: int = 0x100) -> str:
    return "".join(chr(first + number) for number in range(chunks))


@in_joint_pool(**LARGE)
def test_a_chunk_that_completes_many_others_publishes_them_in_bounded_calls(
    pool: JointPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_saves, "PUBLISHED_AT_ONCE", 16)
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    path = path_of(100)
    pool.store(one, LEFT, path)
    first = pool.reserve(two, RIGHT, path[:1])
    behind = pool.reserve(three, RIGHT, path, first=1)
    assert pool.commit(behind) == [PART] * 99
    calls: list[int] = []
    joint = pool.pool._writers.joint_saves
    publish_more = joint.publish_more

    def note_call(now_ns: int) -> int:
        calls.append(publish_more(now_ns))
        return calls[-1]

    monkeypatch.setattr(joint, "publish_more", note_call)
    assert pool.commit(first) == [STORED]
    assert calls == [16, 16, 16, 16, 16, 4]
    assert pool.visible(one, path) == 100
    assert pool.pool._usage.models()["model"].stored_chunks == 100
    assert not joint.are_unpublished


@in_joint_pool(**LARGE)
def test_many_chains_expire_in_bounded_calls(pool: JointPool) -> None:
    one = pool.connect()
    for number in range(100):
        pool.store(one, LEFT, path_of(1, 0x1000 + number))
    pool.pass_time(TTL_NS)
    writers = pool.pool._writers
    assert writers.has_backlog
    assert 0 < pool.counts()["joint_chunks"] < 100
    while writers.has_backlog:
        writers.end_more(pool.clock.ns)
    assert pool.counts()["joint_chunks"] == 0
    assert pool.counts()["expired"] == 100


@in_joint_pool(**LARGE)
def test_long_parts_end_in_bounded_calls(pool: JointPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_saves, "ENDED_AT_ONCE", 16)
    one, two = pool.connect(), pool.connect()
    path = path_of(100)
    pool.store(one, LEFT, path)
    dropped = pool.reserve(two, RIGHT, path)
    pool.drop(two, is_settled=False)
    assert pool.counts()["reservations"] == 0
    assert pool.problems() == []
    assert pool.reserve(one, RIGHT, path).states == [SaveState.PENDING] * 100
    pool.pool._writers.end_more(pool.clock.ns)
    ended = pool.reserve(one, RIGHT, path)
    assert ended.states == [SaveState.RESERVED] * 16 + [SaveState.PENDING] * 84
    pool.settle()
    pool.end(ended)  # asked for by its writer: answered when all of it is free
    assert len(dropped.written) == 100
    assert pool.store(one, RIGHT, path) == [STORED] * 100


@in_joint_pool()
def test_a_chain_is_continued_behind_its_bound_when_it_is_published(
    pool: JointPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_saves, "CHAIN_CHUNKS_MAX", 4)
    one, two = pool.connect(), pool.connect()
    assert pool.store(one, LEFT, "abcdef") == [PART] * 4 + [SaveState.NO_PARENT] * 2
    assert pool.store(two, RIGHT, "abcd") == [STORED] * 4
    assert pool.store(one, LEFT, "abcdef") == [SaveState.PRESENT] * 4 + [PART] * 2
    assert pool.store(two, RIGHT, "abcdef") == [SaveState.PRESENT] * 4 + [STORED] * 2


@in_joint_pool()
def test_a_chain_that_goes_on_lives_as_long_as_chunks_of_it_are_published(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    path = path_of(4 * LIFE_TTLS)
    pool.store(one, LEFT, path[:1])
    for end in range(2, len(path)):
        assert pool.store(one, LEFT, path[:end])[-1] == PART
        pool.pass_time(TTL_NS // 2)
        assert pool.store(two, RIGHT, path[: end - 1])[-1] == STORED
    assert pool.counts()["expired"] == 0


@in_joint_pool()
def test_checksums_in_the_daemon_are_bounded(pool: JointPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_chains, "EXTENTS_MAX", 3 * LAYOUT.extents)
    one, two = pool.connect(), pool.connect()
    assert pool.store(one, LEFT, "abcd") == [PART] * 3 + [SaveState.QUOTA]
    assert pool.store(two, RIGHT, "ab") == [STORED] * 2
    assert pool.store(one, LEFT, "abcd") == [SaveState.PRESENT] * 2 + [PART] * 2


@in_joint_pool()
def test_what_one_connection_begins_counts_for_it_alone(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "ab")
    held = pool.reserve(two, RIGHT, "ab")
    found = pool.pool.held_by_connection()
    assert found[one.connection]["reserved_bytes"] == 2 * LAYOUT.stored_bytes
    assert found[two.connection] == {"reservations": 1}
    pool.drop(one)
    assert pool.pool.held_by_connection()[one.connection]["reserved_bytes"] == 2 * LAYOUT.stored_bytes
    pool.commit(held)
    assert one.connection not in pool.pool.held_by_connection()


@in_joint_pool(**{"server.user_quota": "0.5", "dram.connection_quota": "0.5"})
def test_what_an_ended_connection_has_begun_counts_for_its_user_no_more(pool: JointPool) -> None:
    for number in range(3):
        one, two = pool.connect(user=1000), pool.connect(user=1001)
        pool.store(one, LEFT, path_of(3, 0x200 + 16 * number))
        pool.drop(one)
        assert pool.problems() == []
        extended = path_of(5, 0x200 + 16 * number)
        assert pool.store(two, LEFT, extended) == [PART] * 5
        if number == 2:
            pool.pass_time(TTL_NS)
        else:
            assert pool.store(two, RIGHT, extended) == [STORED] * 5
        assert pool.problems() == []
        pool.drop(two)


@in_joint_pool(**{"server.max_reservations": "4"})
def test_parts_of_a_connection_count_as_its_saves(pool: JointPool) -> None:
    one = pool.connect()
    for number in range(4):
        pool.reserve(one, kv.Share.of_rank(LAYOUT, number, 4), "a")
    with pytest.raises(kv.KVPoolError, match="max_reservations = 4"):
        pool.reserve(one, LEFT, "b")
    assert pool.counts()["reservations"] == 4


class Copier:
    """An engine whose staging has its part of one chunk, in a pool that copies."""

    def __init__(self, pool: JointPool, share: kv.Share) -> None:
        self.pool, self.share = pool, share
        self.session = pool.connect()
        answer, fd = pool.pool.staged.open(self.session)
        self.staging = kvpool_native.Mapping.attach(fd, answer.memory_bytes, writable=True)
        self.extents = share.extents(LAYOUT)

    def reserve(self, path: str) -> PartSave:
        save = self.pool.reserve(self.session, self.share, path)
        rows = np.concatenate([payload(key, extent) for key, _, _ in save.written for extent in self.extents])
        self.staging.view()[: rows.size] = rows
        return save

    def copy(self, save: PartSave, first: int, extents: int) -> "asyncio.Future[m.Done]":
        at = first * LAYOUT.extent_bytes
        request = sm.CopyStaged(save.answer.reservation, 0, 1, first, extents, at)
        answer = self.pool.pool.staged.copy(self.session, request)
        assert isinstance(answer, asyncio.Future)
        return answer

    def commit(self, save: PartSave) -> list[int]:
        key = save.written[0][0]
        sums = [kvpool_native.crc32c(payload(key, extent)) for extent in self.extents]
        request = m.Commit(save.answer.reservation, np.array(sums, "<u4").tobytes(), b"")
        return list(served(self.pool.pool.chains.commit(self.session, request)).states)


class CopyingPool(NamedTuple):
    """A pool that copies, on command."""

    pool: JointPool
    workers: HeldWorkers


@asynccontextmanager
async def copying_pool() -> AsyncIterator[CopyingPool]:
    with held_workers():
        async with joint_pool(**{"server.write_mode": "copy", "server.staging": "256KiB"}) as pool:
            assert isinstance(pool.pool._workers, HeldWorkers)
            yield CopyingPool(pool, pool.pool._workers)


in_copying_pool = in_setting(copying_pool)


@in_copying_pool
async def test_the_daemon_copies_only_the_extents_of_a_part(copying: CopyingPool) -> None:
    pool, workers = copying
    left, right = Copier(pool, LEFT), Copier(pool, RIGHT)
    first, second = left.reserve("a"), right.reserve("a")
    half = len(left.extents) // 2
    for copier, save in ((left, first), (right, second)):
        copier.copy(save, 0, half)
        copier.copy(save, half, half)
    await workers.run()
    assert left.commit(first) == [PART]
    assert right.commit(second) == [STORED]
    assert pool.visible(left.session, "a") == 1


@in_copying_pool
async def test_a_part_that_was_not_copied_whole_is_not_stored_and_opens_again(copying: CopyingPool) -> None:
    pool, workers = copying
    left, right = Copier(pool, LEFT), Copier(pool, RIGHT)
    first, second = left.reserve("a"), right.reserve("a")
    left.copy(first, 0, len(left.extents))
    right.copy(second, 0, len(right.extents) - 1)
    await workers.run()
    assert (left.commit(first), right.commit(second)) == ([PART], [SaveState.CHECKSUM])
    again = right.reserve("a")
    right.copy(again, 0, len(right.extents))
    await workers.run()
    assert right.commit(again) == [STORED]
    assert pool.visible(left.session, "a") == 1


@in_copying_pool
async def test_extents_wait_for_a_copy_into_them_after_their_connection_has_ended(copying: CopyingPool) -> None:
    pool, workers = copying
    left, right = Copier(pool, LEFT), Copier(pool, RIGHT)
    left_save = left.reserve("a")
    left.copy(left_save, 0, len(left.extents))
    await workers.run()
    assert left.commit(left_save) == [PART]
    answer = right.copy(right.reserve("a"), 0, len(right.extents))
    answer.cancel()
    pool.drop(right.session)
    other = Copier(pool, RIGHT)
    assert pool.reserve(other.session, RIGHT, "a").states == [SaveState.PENDING]
    pool.pass_time(TTL_NS)  # the chain expires, and its slot is still being written
    assert pool.counts()["zombies"] == 1
    await workers.run()
    assert pool.counts() | {"expired": 0} == dict.fromkeys(pool.counts(), 0)


@pytest.mark.parametrize(("first", "extents"), [(0, 9), (8, 1), (-1, 1), (0, 0), (7, 2)])
@in_copying_pool
async def test_a_copy_outside_of_a_part_is_refused(copying: CopyingPool, first: int, extents: int) -> None:
    pool, workers = copying
    left = Copier(pool, LEFT)
    save = left.reserve("a")
    assert len(left.extents) == 8
    request = sm.CopyStaged(save.answer.reservation, 0, 1, first, extents, 0)
    with pytest.raises(kv.KVPoolError, match="copy of"):
        pool.pool.staged.copy(left.session, request)
    assert not workers.jobs


@in_joint_pool()
def test_repeated_keys_are_reserved_once(pool: JointPool) -> None:
    one = pool.connect()
    (key,) = chain_of("a")
    answer = served(pool.pool.chains.reserve(one, reserve_share(0, 2, 0, 4, b"", key * 3, b"", b"")))
    assert list(answer.states) == [SaveState.RESERVED, SaveState.NO_PARENT, SaveState.NO_PARENT]
