"""Expiry of priorities: published in time without any request, in both tiers, and kept over a restart."""

from pathlib import Path

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.kvpoolctl import ctl_json
from tests.rigs.payload import payload_of, store, tokens_of

CHAIN = 4
# Longer than a busy machine takes for a save and its demotion.
SHORT_S = 3.0


@pytest.fixture
def tiered(start_daemon: Start, tmp_path: Path) -> Daemon:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__checkpoint_interval="100ms")
    daemon.wait_open()
    return daemon


def save(daemon: Daemon, pool: kv.Pool, number: int, duration_s: float, priority: int = 80) -> kv.KeyChain:
    """Stores a chain with limited retention, in both tiers."""
    keys = pool.keys(tokens_of(7000 + number, CHAIN * SMALL.chunk_tokens))
    ranges = [kv.TokenRange(0, None, priority, duration_s)]
    result = pool.save(keys, from_=payload_of(keys, SMALL), retention=ranges).commit()
    assert result is not None
    assert (result.stored, result.clipped) == (CHAIN, 0)
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
    return keys


def priority_of(daemon: Daemon, key: bytes) -> int:
    (found,) = ctl_json(daemon, "why", key.hex())
    priority: int = found["priority"]
    return priority


def kept(daemon: Daemon) -> tuple[int | float | str, int | float | str]:
    stats = daemon.stats()
    return stats["dram.retained_chunks"], stats["ssd.retained_chunks"]


def test_the_priority_of_chunks_on_ssd_alone_expires_too(tiered: Daemon) -> None:
    with tiered.connect() as pool, tiered.admin() as admin:
        keys = save(tiered, pool, 1, SHORT_S)
        assert admin.flush(None, None, "dram")["chunks"] == CHAIN
        wait_until(lambda: tiered.stats()["ssd.retention_expired_chunks"] == CHAIN, "its time is over")
        assert kept(tiered) == (0, 0)
        assert pool.lookup(keys).chunks == CHAIN, "it is one like any other now"
    assert tiered.problems() == []


@pytest.mark.slow
def test_a_use_in_dram_extends_retention_in_both_tiers(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        keys = save(tiered, pool, 1, 3.0)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHAIN
            other = save(tiered, pool, 2, 0.3)
            wait_until(lambda: tiered.stats()["ssd.retention_expired_chunks"] == CHAIN, "the other one expires")
            assert priority_of(tiered, other[0]) == 35
            assert kept(tiered) == (CHAIN, CHAIN)
        wait_until(lambda: kept(tiered) == (0, 0), "the time counts from the end of the lease")


def reopen(daemon: Daemon) -> None:
    daemon.start()
    daemon.wait_open()


def test_checkpointed_retention_outlives_a_kill_and_comes_back_to_dram(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        keys = save(tiered, pool, 1, 3600.0)  # writes a checkpoint
        assert store(pool, pool.keys(tokens_of(1, SMALL.chunk_tokens))).stored == 1
        tiered.kill()
        reopen(tiered)
        assert kept(tiered) == (0, CHAIN)
        wait_connected(pool)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHAIN
        wait_until(lambda: tiered.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        assert kept(tiered) == (CHAIN, CHAIN)
    assert priority_of(tiered, keys[0]) == 80
    assert tiered.problems() == []


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_expired_retention_stays_expired_after_a_restart(tiered: Daemon, is_killed: bool) -> None:
    with tiered.connect() as pool:
        over = save(tiered, pool, 1, SHORT_S)
        save(tiered, pool, 2, 3600.0)
        wait_until(lambda: tiered.stats()["ssd.retention_expired_chunks"] == CHAIN, "one chain's time is over")
        wait_until(lambda: tiered.stats()["ssd.waiting_rows"] == 0, "the catalogue is written")
        (tiered.kill if is_killed else tiered.stop)()
        reopen(tiered)
        assert kept(tiered) == (0, CHAIN)
    assert priority_of(tiered, over[0]) == 35
    assert tiered.problems() == []


@pytest.mark.slow
def test_retention_time_starts_again_at_a_restart(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        save(tiered, pool, 1, 3.0)
        assert tiered.stop() == 0
        reopen(tiered)
        assert kept(tiered) == (0, CHAIN)
        wait_until(lambda: kept(tiered) == (0, 0), "its time is over, counted from the start")
        assert tiered.stats()["ssd.retention_expired_chunks"] == CHAIN
    assert tiered.problems() == []
