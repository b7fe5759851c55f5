"""Restore of a large SSD tier: the daemon serves engines meanwhile, also requests about chunks that are just restored."""

from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.daemon import Daemon, Start, wait_connected, wait_until
from tests.rigs.large_catalogue import CHAIN, TINY, add_records, tier_for
from tests.rigs.payload import payload_of, store, tokens_of

RECORDS = 16_000
CHAINS = 6
# Before each batch, longer and longer until this process comes while batches are left.
DELAYS = ("100ms", "800ms", "5s")
ALL_RESTORED_S = 120.0
KEPT = (kv.TokenRange(0, None, 80),)


def _keys(pool: kv.Pool, seed: int) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, CHAIN * TINY.chunk_tokens))


def _restoring(start_tiered: Start, ssd: Path) -> Daemon:
    """A daemon that has restored some of RECORDS chunks and CHAINS chains of an engine's, slowly, and not yet all."""
    daemon = start_tiered(**tier_for(RECORDS))
    with daemon.connect(layout=TINY) as pool, daemon.admin() as admin:
        for seed in range(CHAINS):
            store(pool, _keys(pool, seed))
        assert admin.demote_all(60.0)["chunks"] == CHAINS * CHAIN
    assert daemon.stop() == 0
    add_records(ssd, RECORDS, is_old=True)
    for delay in DELAYS:
        daemon.environment["KVPOOL_FAILPOINT"] = f"daemon.ssd.restore:*:delay({delay})"
        daemon.start()
        with daemon.admin() as admin:
            if _state_after_a_batch(admin) == "starting":
                return daemon
        daemon.kill()
    pytest.fail("all batches were restored before anything else could be asked")


def _restored(admin: BlockingConnection) -> tuple[str, int]:
    """The tier's state, and how many of its chunks are back."""
    stats = admin.stats()["ssd"]
    return str(stats["ssd.state"]), int(stats["ssd.restored_chunks"])


def _state_after_a_batch(admin: BlockingConnection) -> str:
    """The tier's state when it was seen first that chunks are back."""
    seen = ("", 0)

    def has_some() -> bool:
        nonlocal seen
        seen = _restored(admin)
        return seen[1] > 0

    wait_until(has_some, "the first batch is restored")
    return seen[0]


def _wait_restored(admin: BlockingConnection) -> None:
    wait_until(lambda: _restored(admin)[0] == "ok", "all batches are restored", ALL_RESTORED_S)


@pytest.mark.slow
def test_an_engine_is_served_while_chunks_are_restored(start_tiered: Start, ssd: Path) -> None:
    daemon = _restoring(start_tiered, ssd)
    with daemon.connect(layout=TINY, timeout_s=20.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        assert pool.retain(_keys(pool, 0), KEPT).accepted == CHAIN
        save = pool.save(_keys(pool, 1), from_=payload_of(_keys(pool, 1), TINY), retention=KEPT)
        assert save.commit().stored == CHAIN
        assert pool.retain(_keys(pool, 2), (kv.TokenRange(0, None, 0),)).accepted == CHAIN
        assert daemon.problems(deep=False) == []
        daemon.problems()  # finds that the made-up records have no bytes
        _wait_restored(admin)
        assert _restored(admin)[1] == RECORDS + CHAINS * CHAIN
        assert pool.lookup(_keys(pool, 0)).chunks == CHAIN
    assert daemon.problems(deep=False) == []
    assert daemon.stop() == 0


def test_chunks_flushed_during_a_restore_are_gone(start_tiered: Start, ssd: Path) -> None:
    daemon = _restoring(start_tiered, ssd)
    with daemon.connect(layout=TINY, timeout_s=20.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        flushed = int(admin.flush(None, None)["chunks"])
        assert flushed >= CHAINS * CHAIN
        assert pool.lookup(_keys(pool, 0)).chunks == 0
        _wait_restored(admin)
        assert int(admin.stats()["ssd"]["ssd.chunks"]) <= RECORDS + CHAINS * CHAIN - flushed
        assert store(pool, _keys(pool, 0)).stored == CHAIN
    assert daemon.problems(deep=False) == []
