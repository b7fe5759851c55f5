"""Leases of long chains, taken part by part, while chunks of what has been taken are dropped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.parts import PART_CHUNKS, Parts
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import Level
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.daemon import SMALL
from tests.rigs.parts import served
from tests.rigs.runs.in_setting import in_setting

T = TypeVar("T")
CHAIN = 2 * PART_CHUNKS + 40
DROPPED = 100  # in the first part
KEYS = keys_of(0, CHAIN)
ZERO_SUM = kvpool_native.crc32c(np.zeros(SMALL.extent_bytes, np.uint8))  # of chunks that nobody wrote


class Setting:
    """A pool that holds one chain, and an engine. With `ssd`, only there."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.session = pool.open_session(ConnectionId(7), "model", SMALL)

    async def serve(self, parts: Parts[T]) -> T:
        """The rest of a request."""
        while True:
            try:
                awaited = next(parts)
            except StopIteration as end:
                answer: T = end.value
                return answer
            if awaited is not None:
                await awaited

    async def store(self) -> None:
        made = await self.serve(self.pool.chains.reserve(self.session, reserve_chain(b"", KEYS)))
        sums = ZERO_SUM.to_bytes(4, "little") * SMALL.extents * CHAIN
        await self.serve(self.pool.chains.commit(self.session, m.Commit(made.reservation, sums, b"")))

    def begin(self, parts: Parts[T]) -> Parts[T]:
        """A request of which the first part has been served, and others may come in."""
        held = self.pool.measure({}).directory["holds"]
        while self.pool.measure({}).directory["holds"] == held:
            assert next(parts) is None
        return parts

    async def acquire(self) -> m.Leased:
        return await self.serve(self.pool.chains.acquire(self.session, m.Acquire(KEYS)))

    async def settle(self) -> None:
        """Until nothing moves between the tiers."""
        while self.pool.measure({}).tiers["ssd"]["ssd.promotions_under_way"]:
            await asyncio.sleep(0.001)

    def drop(self) -> None:
        key = KEYS[DROPPED * KEY_BYTES : (DROPPED + 1) * KEY_BYTES]
        place = self.pool._directory.place_of(key)
        assert self.pool._directory.drop(key, place[1])

    def assert_sound(self) -> None:
        assert self.pool.verify()["problems"] == []


@asynccontextmanager
async def setting_on(ssd: Path | None = None) -> AsyncIterator[Setting]:
    wanted = [f"dram.capacity={2 * CHAIN * SMALL.chunk_bytes}B", "dram.prefault=false", "dram.connection_quota=1.0"]
    wanted += [f"ssd.path={ssd}", "ssd.create=true", "ssd.capacity=64MiB"] if ssd is not None else []
    pool = Pool(load_config(None, [*wanted, "dram.announced_quota=1.0"]), MonotonicClock())
    await pool.start()
    setting = Setting(pool)
    await setting.store()
    yield setting
    setting.assert_sound()
    await pool.stop()


in_pool = in_setting(setting_on)


@in_pool
async def test_a_lease_ends_before_a_chunk_that_was_dropped_during_the_acquire(setting: Setting) -> None:
    parts = setting.begin(setting.pool.chains.acquire(setting.session, m.Acquire(KEYS)))
    setting.drop()
    leased = await setting.serve(parts)
    assert leased.chunks == DROPPED
    assert set(leased.tiers) == {Level.DRAM}
    setting.pool.leases.release(setting.session, leased.lease)


@in_pool
async def test_a_check_counts_the_holds_of_an_unfinished_acquire(setting: Setting) -> None:
    parts = setting.begin(setting.pool.chains.acquire(setting.session, m.Acquire(KEYS)))
    setting.assert_sound()
    parts.close()
    setting.assert_sound()


@pytest.mark.asyncio
async def test_a_chunk_dropped_and_saved_again_during_an_acquire_or_a_hint_is_taken_anew(tmp_path: Path) -> None:
    async with setting_on(tmp_path / "ssd") as setting:
        pool = setting.pool
        while pool.measure({}).tiers["ssd"]["ssd.state"] != "ok":
            await asyncio.sleep(0.001)
        assert (await pool.demote_all(10.0))["left"] == 0
        served(pool.flush(None, None, "dram"))
        leasing = setting.begin(pool.chains.acquire(setting.session, m.Acquire(KEYS)))
        hint = setting.begin(pool.hints.announce(setting.session, m.Announce(KEYS)))
        await setting.settle()
        setting.drop()
        leased = await setting.acquire()
        assert leased.chunks == CHAIN
        assert (await setting.serve(leasing)).chunks == CHAIN
        assert (await setting.serve(hint)).chunks == CHAIN
        await setting.settle()
