"""Opening of the SSD tier: what fails once is tried again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.pool.pool import Pool
from kvpool.tiers.base import TierState
from kvpool.tiers.ssd import tier as ssd_tier
from kvpool.tiers.ssd.opening import open_ssd
from kvpool.tiers.ssd.tier import SsdTier

LIMIT_S = 60.0


def test_an_opening_that_gets_no_thread_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["dram.capacity=16MiB", f"ssd.path={tmp_path / 'ssd'}", "ssd.capacity=16MiB", "ssd.create=true"]
    reasons: list[str] = []
    really_open: Callable[..., Any] = open_ssd

    async def live_until_open() -> None:
        pool = Pool(load_config(None, options), MonotonicClock())
        (tier,) = (link.lower for link in pool._tiering.links)
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


async def _until_open(tier: SsdTier) -> None:
    while tier.state != TierState.OK:
        await asyncio.sleep(0.01)
