"""Opening of the SSD tier: what fails once is tried again, and nothing of it comes before the pool can be served."""

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.memory_limit import describe
from kvpool.pool.pool import Pool
from kvpool.tiers.base import TierState
from kvpool.tiers.dram.tier import DramTier
from kvpool.tiers.ssd import opening as ssd_opening
from kvpool.tiers.ssd import tier as ssd_tier
from kvpool.tiers.ssd.directory import SsdUnavailable
from kvpool.tiers.ssd.opening import open_ssd
from kvpool.tiers.ssd.plan import plan_ssd
from kvpool.tiers.ssd.tier import SsdTier

LIMIT_S = 60.0
UNEXPECTED_S = 0.2  # how long an opening that comes too early is waited for


def test_an_opening_that_gets_no_thread_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["dram.capacity=16MiB", f"ssd.path={tmp_path / 'ssd'}", "ssd.capacity=16MiB", "ssd.create=true"]
    reasons: list[str] = []
    really_open: Callable[..., Any] = open_ssd

    async def live_until_open() -> None:
        pool = Pool(load_config(None, options), MonotonicClock())
        (tier,) = (link.tier for link in pool._tiering.links)
        assert isinstance(tier, SsdTier)

        def open_at_second(*arguments: Any) -> Any:
            reasons.append(tier.state_reason)
            if len(reasons) == 1:
                raise RuntimeError("can't start new thread")
            return really_open(*arguments)

        monkeypatch.setattr(ssd_tier, "open_ssd", open_at_second)
        await pool.start()
        try:
            await asyncio.wait_for(_until_open(tier), LIMIT_S)
        finally:
            await pool.stop()

    asyncio.run(live_until_open())
    assert reasons == ["", "can't start new thread"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BlockingIOError(11, os.strerror(11)), "[Errno 11] Resource temporarily unavailable"),
        (OSError(12, os.strerror(12)), "[Errno 12] Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "out of memory"),
    ],
)
def test_an_opening_for_want_of_address_space_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(ssd_opening, "_open", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512 << 20, 512 << 20))
    options = ["dram.capacity=16MiB", f"ssd.path={tmp_path / 'ssd'}", "ssd.capacity=16MiB", "ssd.create=true"]
    plan = plan_ssd(load_config(None, options).ssd)
    with pytest.raises(SsdUnavailable) as raised:
        open_ssd(plan, None, threading.Event())  # type: ignore[arg-type] # it fails before it has a use for memory
    assert str(raised.value) == (
        f"{plan.path}: {text}; the process may have 512.0 MiB of address space: raise or remove the limit (ulimit -v, LimitAS)"
    )
    assert "limit" not in describe(OSError(2, "no such file"))


def test_nothing_of_the_tier_is_opened_before_the_pool_can_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["dram.capacity=16MiB", f"ssd.path={tmp_path / 'ssd'}", "ssd.capacity=16MiB", "ssd.create=true"]
    begun = threading.Event()
    prefault: Callable[[DramTier], int | None] = DramTier.prefault_next

    def open_and_say_so(*arguments: Any) -> Any:
        begun.set()
        return open_ssd(*arguments)

    def prefault_slowly(dram: DramTier) -> int | None:
        begun.wait(UNEXPECTED_S)
        return prefault(dram)

    async def live_until_open() -> None:
        pool = Pool(load_config(None, options), MonotonicClock())
        (tier,) = (link.tier for link in pool._tiering.links)
        assert isinstance(tier, SsdTier)
        try:
            await pool.start()
            assert not begun.is_set()
            await asyncio.wait_for(_until_open(tier), LIMIT_S)
        finally:
            await pool.stop()

    monkeypatch.setattr(ssd_tier, "open_ssd", open_and_say_so)
    monkeypatch.setattr(DramTier, "prefault_next", prefault_slowly)
    asyncio.run(live_until_open())


async def _until_open(tier: SsdTier) -> None:
    while tier.state != TierState.OK:
        await asyncio.sleep(0.01)
