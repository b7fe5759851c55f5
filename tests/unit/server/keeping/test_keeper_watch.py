"""Keeper watch: a keeper that ends while its daemon runs is followed by another one, which gets everything."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.index.holders import Process, has_ended
from kvpool.pool.pool import Pool
from kvpool.server.keeping.keeper_watch import KeeperWatch, watch_keeper
from kvpool.server.keeping.own_keeper import OwnKeeper, drop_everything
from kvpool.tiers.dram.kept.kept_memory import KeptMemory

LOOKS_S = 60.0


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    """Where a daemon has its socket; the keeper there ends with the test."""
    yield str(tmp_path / "kvpool.sock")
    drop_everything(str(tmp_path / "kvpool.sock"))


async def _until_kept(pool: Pool) -> None:
    async def look() -> None:
        while not pool.is_kept:
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), LOOKS_S)


async def _until_lost(pool: Pool) -> None:
    async def look() -> None:
        while pool.is_kept:
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), LOOKS_S)


def _pool(socket_path: str) -> tuple[Pool, OwnKeeper]:
    keeper = OwnKeeper(socket_path, 600)
    kept = KeptMemory(keeper, b"", MonotonicClock())
    return Pool(load_config(None, ["dram.capacity=1MiB", "dram.prefault=false"]), MonotonicClock(), (), kept), keeper


def test_a_killed_keeper_is_followed_by_another_one_with_everything(
    socket_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        pool, keeper = _pool(socket_path)
        await pool.start()
        watch = KeeperWatch(keeper, pool.kept, again_s=0.01)
        pids = []
        for _ in range(3):
            before = set(keeper.take_memory())
            pids.append(keeper.pid)
            os.kill(keeper.pid, signal.SIGKILL)
            await _until_lost(pool)
            assert "nobody" in str(pool.info()["dram_kept_by"])
            await _until_kept(pool)
            assert set(keeper.take_memory()) == before
            assert f"process {keeper.pid})" in str(pool.info()["dram_kept_by"])
        assert len({*pids, keeper.pid}) == 4
        watch.stop()
        await pool.stop()
        keeper.close()

    asyncio.run(live())
    assert caplog.text.count("has ended: dram is kept by nobody") == 3


def test_it_is_tried_again_and_ends_with_the_daemon(socket_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        pool, keeper = _pool(socket_path)
        await pool.start()
        watch = KeeperWatch(keeper, pool.kept, again_s=0.01)
        killed = Process(keeper.pid)
        with monkeypatch.context() as broken:
            broken.setattr("kvpool.server.keeping.own_keeper.sys.executable", "/nonexistent")
            os.kill(killed.pid, signal.SIGKILL)
            assert has_ended(killed, 60.0)
            while "cannot be started" not in pool.kept.why_unkept:
                await asyncio.sleep(0.002)
        await _until_kept(pool)
        os.kill(keeper.pid, signal.SIGKILL)
        await _until_lost(pool)
        watch.stop()
        await asyncio.sleep(0.05)
        assert not pool.is_kept
        await pool.stop()
        keeper.close()

    asyncio.run(live())


def test_nothing_is_watched_that_is_not_kept(socket_path: str) -> None:
    async def live() -> None:
        keeper = OwnKeeper(socket_path, 600)
        kept = KeptMemory(keeper, b"", MonotonicClock())
        assert watch_keeper(keeper, kept) is None
        assert watch_keeper(None, kept) is None

    asyncio.run(live())


def test_what_could_not_be_handed_over_is_given_to_another_one(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        pool, keeper = _pool(socket_path)
        with monkeypatch.context() as broken:
            broken.setattr("kvpool.server.keeping.own_keeper.sys.executable", "/nonexistent")
            await pool.start()
        assert not pool.is_kept
        watch = watch_keeper(keeper, pool.kept)
        assert watch is not None
        watch.stop()
        watch = KeeperWatch(keeper, pool.kept, again_s=0.01)
        await _until_kept(pool)
        assert len(keeper.take_memory()) == 5
        watch.stop()
        await pool.stop()
        keeper.close()

    asyncio.run(live())


def test_keeping_that_has_ended_is_not_tried_again(socket_path: str) -> None:
    async def live() -> None:
        pool, keeper = _pool(socket_path)
        await pool.start()
        watch = KeeperWatch(keeper, pool.kept, again_s=0.01)
        pool.kept.end("its book is full")
        os.kill(keeper.pid, signal.SIGKILL)
        while watch._task is None:
            await asyncio.sleep(0.002)
        await asyncio.wait_for(watch._task, LOOKS_S)
        assert not pool.is_kept
        assert "nobody" in str(pool.info()["dram_kept_by"])
        watch.stop()
        await pool.stop()
        keeper.close()

    asyncio.run(live())
