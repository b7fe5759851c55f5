"""Copies of leased chunks in device memory: made after a lease, in order, within the budget, never in anybody's way."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvpool.tiers.base import Outcome
from tests.rigs.tiers.copies_pool import BIG, DEVICE_CHUNKS, CopiesPool
from tests.rigs.tiers.tiered_pool import key_of, medium_of, payload

DRAM_CHUNKS = 80
CHAIN = [key_of(0, number) for number in range(DEVICE_CHUNKS - 8)]


def in_pool(check: Callable[[CopiesPool], Awaitable[None]], *options: str) -> None:
    """A pool with a device, and an engine on it that has stored CHAIN."""

    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS, *options)
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        await check(pool)
        await pool.stop()

    asyncio.run(run())


def test_rows_begin_at_a_number_and_end_with_the_last_copy() -> None:
    async def check(pool: CopiesPool) -> None:
        await pool.read_copies(CHAIN[:3])
        await pool.settled()
        leased = await pool.lease(CHAIN)
        rows = pool.copies_of(leased)
        assert len(rows) == 3
        assert pool.copies_of(leased, 2) == rows[2:]
        assert pool.copies_of(leased, 3) == pool.copies_of(leased, 99) == []
        await pool.settled()
        assert pool.copies_of(leased)[:3] == rows
        pool.pool.leases.release(pool.session, leased.lease)
        assert pool.copies_of(leased) == []

    in_pool(check)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_copy_that_fails_ends_the_part_before_it_and_its_slot_is_free_again(outcome: Outcome) -> None:
    async def check(pool: CopiesPool) -> None:
        pool.device.outcome_of = lambda _kind, number: outcome if number == 3 else Outcome.DONE
        await pool.load(CHAIN)
        await pool.settled()
        counted = pool.link.stats()
        assert (counted["hbm.chunks"], counted["hbm.failed_chunks"]) == (2, 2)  # four are a part
        assert counted["hbm.used_bytes"] == 2 * BIG.chunk_bytes
        await pool.load(CHAIN)
        await pool.settled()
        assert await pool.read_copies(CHAIN) == len(CHAIN)

    in_pool(check)


def test_bad_bytes_in_dram_are_dropped_there_and_not_copied() -> None:
    async def check(pool: CopiesPool) -> None:
        leased = await pool.lease(CHAIN)
        pool.pool.leases.release(pool.session, leased.lease)
        await pool.settled()
        await pool.flush("hbm")
        offset = int.from_bytes(leased.offsets[16:24], "little")
        pool.arena[offset] ^= 0xFF
        leased = await pool.lease(CHAIN)
        await pool.settled()
        pool.pool.leases.release(pool.session, leased.lease)
        assert pool.link.stats()["hbm.bad_sources"] == 1
        assert pool.pool._directory.stats()["chunks"] == 2
        assert await pool.read_copies(CHAIN) == 2

    in_pool(check)


def test_only_so_much_is_under_way_and_a_device_that_takes_no_more_is_given_the_rest_later() -> None:
    async def check(pool: CopiesPool) -> None:
        pool.device.is_withholding = True
        await pool.load(CHAIN)
        await pool.until_moved(lambda: pool.link.pins > 0)
        assert pool.link.pins * BIG.chunk_bytes <= pool.device.memory.size // 2
        pool.assert_sound()
        pool.device.is_withholding = False
        pool.device.release()
        await pool.settled()
        assert await pool.read_copies(CHAIN) == len(CHAIN)

    in_pool(check)


def test_what_came_from_the_disk_is_copied_with_a_later_lease() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS, media=[medium_of(8 * DRAM_CHUNKS * BIG.chunk_bytes // 4096)])
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        assert await pool.demote() == 0
        await pool.flush("dram")
        assert await pool.load(CHAIN) == len(CHAIN)
        await pool.settled()
        await pool.load(CHAIN)
        await pool.settled()
        assert await pool.read_copies(CHAIN) == len(CHAIN)
        await pool.stop()

    asyncio.run(run())


def test_each_chunk_of_a_leased_set_of_a_full_group_is_copied() -> None:
    chunks = [key_of(1, number) for number in range(7)]

    async def check(pool: CopiesPool) -> None:
        for chunk in chunks:
            assert await pool.save([chunk]) == 1  # of no chain
        leased = await pool.lease(chunks, set_of=1)
        await pool.settled()
        rows = pool.copies_of(leased)
        assert [generation != 0 for _, _, generation in rows] == [True] * len(chunks)
        # The hold of a full group has the first key last.
        for key, (offset, _, _) in zip(reversed(chunks), rows, strict=True):
            copy = pool.device.memory.view()[offset : offset + BIG.chunk_bytes].tobytes()
            assert copy == payload(key, BIG)
        pool.pool.leases.release(pool.session, leased.lease)
        counted = pool.link.stats()
        assert (counted["hbm.leased_chunks"], counted["hbm.served_chunks"]) == (len(chunks), 0)

    in_pool(check)
