"""Sets of which lower tiers have some: brought in runs, and answered by key: one that fails or is absent fails alone."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.pool.readers.set_task import SOUGHT_AT_ONCE
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from tests.rigs.tiers.memory_tier import Fault
from tests.rigs.tiers.tiered_pool import CHUNK, LAYOUT, TieredPool, key_of, medium_of, payload

pytestmark = pytest.mark.asyncio
WINDOWED = replace(LAYOUT, group=GroupRole(WINDOW, 64 * LAYOUT.chunk_tokens, 0))
COUNT = 2 * SOUGHT_AT_ONCE + 5
KEYS = [key_of(8, number) for number in range(COUNT)]
ABSENT = [key_of(9, number) for number in range(3)]


@asynccontextmanager
async def pool_over_disk(
    dram_chunks: int = 2 * COUNT,
    layout: Layout = LAYOUT,
    stored: Sequence[bytes] = KEYS,
    disk_chunks: int = 3 * COUNT,
) -> AsyncIterator[TieredPool]:
    """A pool whose lower tier alone has these chunks, each without a parent. Nothing is held or broken when it ends."""
    pool = TieredPool([medium_of(disk_chunks)], dram_chunks)
    await pool.start()
    pool.pool.drop_connection(pool.session.connection)
    pool.session = pool.pool.open_session(ConnectionId(1), "model", layout)
    for key in stored:
        assert await pool.save([key]) == 1
        if pool.pool._directory.stats()["used_bytes"] >= (dram_chunks - 1) * CHUNK:
            assert await pool.demote() == 0
    assert await pool.demote() == 0
    await pool.flush("dram")
    yield pool
    await pool.until_moved(lambda: pool.pool._tiering.holds == 0)
    assert pool.pool._directory.stats()["holds"] == 0
    assert pool.tier.slots.directory.stats()["pins"] == 0
    await pool.stop()


async def lease(pool: TieredPool, keys: Sequence[bytes], session: EngineSession | None = None) -> m.Leased:
    """A lease of a set; the books are right after each part of it."""
    parts = pool.pool.chains.acquire(session or pool.session, m.Acquire(b"".join(keys), set_of=1))
    while True:
        try:
            awaited = next(parts)
        except StopIteration as end:
            leased: m.Leased = end.value
            return leased
        pool.assert_sound()
        await (asyncio.sleep(0) if awaited is None else awaited)


async def load(pool: TieredPool, keys: Sequence[bytes], session: EngineSession | None = None) -> list[str]:
    """Lease a set: of each key whether it was "absent", "landed" with the bytes of its key, or "failed"."""
    used = session or pool.session
    leased = await lease(pool, keys, used)
    found = pool.pool._readers.find(used, leased.lease)
    if found is None:
        assert leased.tiers == bytes([m.NO_LEVEL]) * len(keys)
        return ["absent"] * len(keys)
    (hold,) = found.holds[used.layout.ranks[0]]
    await pool.until_moved(lambda: not {Level.SSD, Level.PEER} & set(pool.pool._directory.columns([hold]).levels))
    states = []
    for number, key in enumerate(keys):
        (offset,) = struct.unpack_from("<Q", leased.offsets, 8 * number)
        if leased.tiers[number] == m.NO_LEVEL:
            states.append("absent")
        elif pool.pool._directory.place_of(key)[1] == struct.unpack_from("<Q", leased.generations, 8 * number)[0]:
            assert pool.arena[offset : offset + CHUNK].tobytes() == payload(key), "wrong bytes"
            states.append("landed")
        else:
            states.append("failed")
    assert leased.chunks == len(keys) - states.count("absent")
    pool.pool.leases.release(used, leased.lease)
    return states


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["chained", "window"])
async def test_what_the_disk_has_of_a_set_is_read_in_runs_and_what_is_nowhere_is_absent(layout: Layout) -> None:
    async with pool_over_disk(layout=layout) as pool:
        jobs = pool.tier._jobs
        keys = [ABSENT[0], *KEYS[:50], ABSENT[1], *KEYS[50:], ABSENT[2]]
        states = await load(pool, keys)
        assert states == ["absent" if key in ABSENT else "landed" for key in keys]
        assert pool.tier._jobs - jobs == -(-len(keys) // SOUGHT_AT_ONCE)
        assert await load(pool, keys[::-1]) == states[::-1]
        assert pool.tier._jobs - jobs == -(-len(keys) // SOUGHT_AT_ONCE), "all of it is in DRAM now"


async def test_what_leaves_dram_for_a_set_takes_no_place_on_disk_from_the_rest_of_it() -> None:
    """The disk is full, and has nothing that was used as long ago as the set. DRAM is full of what no disk has."""
    others = [key_of(10, number) for number in range(COUNT)]
    async with pool_over_disk(stored=[*KEYS, *others], disk_chunks=2 * COUNT) as pool:
        pool.tier.accepts_jobs = False
        for number in range(2 * COUNT - 1):
            assert await pool.save([key_of(11, number)]) == 1
        pool.tier.accepts_jobs = True
        evicted = pool.tier.slots.directory.stats()["evicted_chunks"]
        assert await load(pool, KEYS) == ["landed"] * COUNT
        assert pool.tier.slots.directory.stats()["evicted_chunks"] > evicted, "there was no room without that"


async def test_a_set_that_is_all_that_the_disk_has_ends_and_what_is_loaded_is_right() -> None:
    """Nothing of it may leave the disk, so that nothing that DRAM alone has can be written there."""
    async with pool_over_disk(disk_chunks=COUNT) as pool:
        pool.tier.accepts_jobs = False
        for number in range(2 * COUNT - 1):
            assert await pool.save([key_of(11, number)]) == 1
        pool.tier.accepts_jobs = True
        states = await load(pool, KEYS)
        assert states.count("landed") > 0
        assert set(states) <= {"landed", "absent"}


async def test_of_a_set_a_chunk_with_wrong_bytes_and_one_that_cannot_be_read_fail_alone() -> None:
    async with pool_over_disk() as pool:
        keys, bad, unread = KEYS[:20], KEYS[7], KEYS[12]
        pool.tier.medium.spoil(bad)
        pool.tier.fault_of = lambda kind, key: Fault.ERROR if (kind, key) == ("read", unread) else Fault.NONE
        states = await load(pool, keys)
        # Read before the lease is granted, such a chunk is no part of it.
        assert {states[7], states[12]} <= {"failed", "absent"}
        assert [state for state in states if state != "landed"] == [states[7], states[12]]
        pool.tier.fault_of = lambda _kind, _key: Fault.NONE
        assert await load(pool, keys) == ["absent" if key == bad else "landed" for key in keys]


async def test_a_tier_that_takes_no_job_leaves_out_what_it_alone_has() -> None:
    async with pool_over_disk() as pool:
        assert await load(pool, KEYS[:4]) == ["landed"] * 4
        pool.tier.accepts_jobs = False
        assert await load(pool, KEYS[2:8]) == ["landed"] * 2 + ["absent"] * 4
        pool.tier.accepts_jobs = True
        assert await load(pool, KEYS[2:8]) == ["landed"] * 6


async def test_what_dram_has_of_a_set_makes_no_room_for_what_the_set_names_before_it() -> None:
    room = 20
    async with pool_over_disk(dram_chunks=room, stored=KEYS[:40]) as pool:
        assert await load(pool, KEYS[:8]) == ["landed"] * 8
        keys = [*ABSENT, *KEYS[8:40], *KEYS[:8]]
        states = await load(pool, keys)
        assert states[-8:] == ["landed"] * 8
        assert states.count("landed") == room, "the rest of the room is used too"
        assert states[:3] == ["absent"] * 3


async def test_two_requests_for_the_same_chunks_read_each_once() -> None:
    async with pool_over_disk() as pool:
        other = pool.pool.open_session(ConnectionId(2), "model", LAYOUT)
        first, second = KEYS[: 2 * SOUGHT_AT_ONCE], KEYS[SOUGHT_AT_ONCE // 2 :][::-1]
        before = pool.pool._directory.stats()["promoted_chunks"]
        loads = await asyncio.gather(load(pool, first), load(pool, second, other))
        assert list(loads) == [["landed"] * len(first), ["landed"] * len(second)]
        assert pool.pool._directory.stats()["promoted_chunks"] - before == len({*first, *second})
        pool.pool.drop_connection(other.connection)


async def test_over_ranks_a_chunk_is_leased_where_all_have_it_in_whichever_tier() -> None:
    async with pool_over_disk(stored=()) as pool:
        count = SOUGHT_AT_ONCE
        ranks = [replace(LAYOUT, world=2, rank=rank) for rank in range(2)]
        of_rank = [[key_of(rank, number) for number in range(count)] for rank in range(2)]
        scheduler = pool.pool.open_session(ConnectionId(2), "model", replace(LAYOUT, world=2, rank=None))
        lacking = ({3, count - 1}, {7})  # by rank: what it never had
        engine = pool.session
        for rank, layout in enumerate(ranks):
            pool.session = pool.pool.open_session(ConnectionId(3 + rank), "model", layout)
            for number, key in enumerate(of_rank[rank]):
                if number not in lacking[rank]:
                    assert await pool.save([key]) == 1
        assert await pool.demote() == 0
        await pool.flush("dram")
        pool.session = pool.pool.open_session(ConnectionId(5), "model", ranks[1])
        assert await load(pool, of_rank[1][:10]) == ["absent" if number == 7 else "landed" for number in range(10)]
        leased = await lease(pool, [*of_rank[0], *of_rank[1]], scheduler)
        gone = lacking[0] | lacking[1]
        assert [level != m.NO_LEVEL for level in leased.tiers] == [number not in gone for number in range(count)]
        assert leased.chunks == count - len(gone)
        held = pool.pool._readers.find(scheduler, leased.lease)
        assert held is not None
        for rank, (hold,) in held.holds.items():
            places = [number for number in range(count) if number not in gone][::-1]
            of_hold = [pool.pool._directory.key_of(hold, row) for row in range(len(places))]
            assert of_hold == [of_rank[rank][place] for place in places]
        pool.pool.leases.release(scheduler, leased.lease)
        for connection in range(2, 6):
            pool.pool.drop_connection(ConnectionId(connection))
        pool.session = engine
