"""The device tier when its device is late, missing, failing or hanging: the pool serves as without it."""

import asyncio
import threading

import pytest

from kvpool.errors import ProtocolError, Refused
from kvpool.protocol.records import device as dm
from kvpool.tiers.base import Outcome, TierState
from kvpool.tiers.hbm.tier import ERRORS_UNTIL_OFFLINE, HbmTier
from tests.rigs.tiers.copies_pool import CopiesPool
from tests.rigs.tiers.memory_device import UUID
from tests.rigs.tiers.tiered_pool import key_of

DRAM_CHUNKS = 80
CHAIN = [key_of(0, number) for number in range(6)]
OUT_OF_MEMORY = "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Openings are retried at once."""
    monkeypatch.setattr("kvpool.tiers.hbm.tier.FIRST_PAUSE_S", 0.001)


@pytest.mark.usefixtures("soon")
def test_a_device_that_cannot_be_opened_is_reported_and_tried_again() -> None:
    async def run() -> None:
        failures = [OUT_OF_MEMORY] * 3
        pool = CopiesPool(DRAM_CHUNKS, failures=failures)
        await pool.start()
        tier = pool.link.tier
        await pool.until_moved(lambda: tier.state is TierState.OFFLINE)
        assert pool.pool.shortcomings() == [f"hbm: cuda:0 could not be opened: {OUT_OF_MEMORY}"]
        assert pool.pool.info()["hbm_reason"] == OUT_OF_MEMORY
        with pytest.raises(Refused, match="device: the hbm tier is not in use now"):
            pool.pool.device_copies.open(pool.session, UUID)
        assert await pool.save(CHAIN) == await pool.load(CHAIN) == len(CHAIN)
        await pool.open_device()
        assert not failures
        assert (pool.pool.shortcomings(), pool.pool.problems()) == ([], [])
        await pool.load(CHAIN)
        await pool.settled()
        assert await pool.read_copies(CHAIN) == len(CHAIN)
        await pool.stop()

    asyncio.run(run())


def test_a_driver_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tiers.hbm.tier.OPENING_S", 0.001)

    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        opens, tier = threading.Event(), pool.link.tier
        assert isinstance(tier, HbmTier)
        open_device = tier._open_device
        monkeypatch.setattr(tier, "_open_device", lambda *args: opens.wait(10.0) and open_device(*args))
        await pool.start()
        await pool.until_moved(lambda: bool(pool.pool.shortcomings()))
        assert tier.state is TierState.STARTING
        assert "has not answered for 0.001 s" in pool.pool.shortcomings()[0]
        opens.set()
        await pool.open_device()
        assert pool.pool.shortcomings() == []
        await pool.stop()

    asyncio.run(run())


def test_an_engine_on_another_device_and_a_malformed_uuid_are_refused() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        copies = pool.pool.device_copies
        with pytest.raises(Refused, match=f"device: the engine is on device {UUID[::-1].hex()}, the daemon's is"):
            copies.open(pool.session, UUID[::-1])
        with pytest.raises(ProtocolError, match="uuid has 3 bytes, expected 16"):
            copies.open(pool.session, b"abc")
        with pytest.raises(ProtocolError, match="first is -1"):
            copies.find_copies(pool.session, dm.FindCopies(1, -1))
        assert copies.find_copies(pool.session, dm.FindCopies(99, 0)) == dm.Copies(b"", b"", b"")
        await pool.stop()

    asyncio.run(run())


def test_a_device_that_hangs_is_given_up_with_all_copies() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        await pool.load(CHAIN[:3])
        await pool.settled()
        leased = await pool.lease(CHAIN[:3])
        slots = [slot for _, slot, _ in pool.copies_of(leased)]
        pool.device.is_withholding = True
        await pool.load(CHAIN)
        await pool.until_moved(lambda: pool.link.pins > 0)
        pool.device.hang()
        await pool.until_moved(lambda: not pool.link.pins and not pool.link.stats()["hbm.chunks"])
        assert pool.copies_of(leased) == []
        assert [pool.pool._index_view.generation_at(slot) for slot in slots] == [0, 0, 0]
        assert pool.pool.problems() == [], "a restart would cost the chunks of DRAM"
        (line,) = pool.pool.shortcomings()
        assert line == "hbm: the device is not used until the daemon restarts: because it does not answer"
        assert await pool.read_copies(CHAIN) == 0
        assert await pool.load(CHAIN) == len(CHAIN)
        assert len(pool.devices) == 1
        await pool.stop()

    asyncio.run(run())


def test_a_device_that_fails_again_and_again_is_given_up_and_one_that_recovers_is_not() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        pool.device.outcome_of = lambda _kind, number: Outcome.DONE if number % 3 == 1 else Outcome.FAILED
        for _ in range(4):
            await pool.load(CHAIN)
            await pool.settled()
            await pool.flush("hbm")
        assert pool.link.tier.can_copy
        assert int(pool.link.stats()["hbm.failed_chunks"]) >= ERRORS_UNTIL_OFFLINE
        pool.device.outcome_of = lambda _kind, _number: Outcome.FAILED
        for _ in range(ERRORS_UNTIL_OFFLINE):
            assert pool.link.tier.can_copy
            await pool.load(CHAIN)
            await pool.settled()
        assert pool.link.tier.state is TierState.OFFLINE
        assert "jobs failed in a row" in pool.pool.shortcomings()[0]
        await pool.stop()

    asyncio.run(run())


@pytest.mark.parametrize("closes", [True, False])
def test_a_stop_reports_what_is_under_way_and_says_whether_a_thread_is_left(closes: bool) -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        pool.device.is_withholding, pool.device.closes = True, closes
        await pool.load(CHAIN)
        await pool.until_moved(lambda: pool.link.pins > 0)
        pool.pool.drop_connection(pool.session.connection)
        assert await pool.pool.stop() is closes
        assert pool.link.pins == 0
        assert pool.pool.verify()["problems"] == []

    asyncio.run(run())


def test_a_bad_copy_is_found_by_a_check_dropped_alone_and_counted() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        assert await pool.save(CHAIN) == len(CHAIN)
        await pool.load(CHAIN)
        await pool.settled()
        leased = await pool.lease(CHAIN)
        pool.device.spoil(pool.copies_of(leased)[-1][0])
        (tier,) = (tier for name, tier in pool.pool.verify()["tiers"].items() if name == "hbm")
        places = [(tier["level"], place) for place in range(tier["entries"])]
        found = await pool.pool._scrub.read(places, len(places))
        assert (found.chunks, [(bad.tier, bad.key) for bad in found.bad]) == (len(CHAIN), [("hbm", CHAIN[-1])])
        assert pool.link.stats()["hbm.corrupt_chunks"] == 1
        assert len(pool.copies_of(leased)) == len(CHAIN) - 1
        assert await pool.load(CHAIN) == len(CHAIN)
        await pool.stop()

    asyncio.run(run())
