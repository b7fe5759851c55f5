"""Announcements: chunks of waiting requests are in DRAM when the request runs, within bounds, under any other use of DRAM."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.types import Level
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

DRAM_CHUNKS = 32
CHAIN = 4

Start = Callable[..., Daemon]


OPTIONS = {
    "dram.capacity": f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
    "dram.announced_quota": "1.0",
    "ssd.capacity": "64MiB",
}


@pytest.fixture
def start(start_daemon: Start, tmp_path: Path) -> Start:
    """Starts a daemon with little DRAM over an SSD tier."""

    def make(**options: str) -> Daemon:
        given = {name.replace(".", "__"): value for name, value in OPTIONS.items()}
        daemon = start_daemon(**{**given, "ssd__path": str(tmp_path / "ssd"), **options})
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        return daemon

    return make


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One such daemon, where announcements last, for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("lasting")
    with Daemon(directory, **{**OPTIONS, "dram.announced_ttl": "1h", "ssd.path": str(directory / "ssd")}) as daemon:
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        yield daemon


@pytest.fixture
def emptied(lasting: Daemon) -> Daemon:
    """The same, with nothing in it."""
    wait_until(lambda: lasting.stats()["announcements"] == 0, "the connections of other tests have ended")
    wait_until(lambda: lasting.stats()["ssd.promotions_under_way"] == 0, "so have their promotions")
    with lasting.admin() as admin:
        admin.flush(None, None)
    return lasting


def keys_of(pool: kv.Pool, number: int, chunks: int = CHAIN) -> kv.KeyChain:
    return pool.keys(tokens_of(4000 + number, chunks * SMALL.chunk_tokens))


def fill(pool: kv.Pool, numbers: range) -> list[kv.KeyChain]:
    stored = [keys_of(pool, number) for number in numbers]
    for keys in stored:
        assert store(pool, keys).declined == 0
    return stored


def levels(pool: kv.Pool, keys: kv.KeyChain) -> list[int]:
    tiers: list[int] = pool.lookup(keys).tiers.tolist()
    return tiers


def only_on_ssd(daemon: Daemon, pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    """Chains that DRAM does not have."""
    stored = fill(pool, range(count))
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
    assert all(levels(pool, keys) == [Level.SSD] * CHAIN for keys in stored)
    return stored


def in_dram(pool: kv.Pool, keys: kv.KeyChain) -> Callable[[], bool]:
    return lambda: levels(pool, keys) == [Level.DRAM] * CHAIN


def test_announced_chunks_are_promoted_and_survive_pressure_until_they_are_used(start: Start) -> None:
    daemon = start(dram__announced_ttl="1h")
    with daemon.connect() as pool, daemon.connect() as other:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys) == kv.AnnounceResult(CHAIN, 0, 0)
        wait_until(in_dram(pool, keys), "announced chunks are in DRAM")
        fill(other, range(100, 100 + 2 * DRAM_CHUNKS // CHAIN))
        assert in_dram(pool, keys)()
        assert daemon.stats()["announcements"] == 1
        result, into = load_all(pool, keys)
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
        assert daemon.stats()["announcements"] == 0
        fill(other, range(200, 200 + 2 * DRAM_CHUNKS // CHAIN))
        assert levels(pool, keys) == [Level.SSD] * CHAIN
    assert daemon.problems() == []


def test_an_unused_announcement_expires(start: Start) -> None:
    daemon = start(dram__announced_ttl="100ms")
    with daemon.connect() as pool:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys).announced == CHAIN
        wait_until(lambda: daemon.stats()["announcements"] == 0, "the time is over")
        wait_until(lambda: daemon.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        fill(pool, range(100, 100 + 2 * DRAM_CHUNKS // CHAIN))
        assert levels(pool, keys) == [Level.SSD] * CHAIN
    assert daemon.problems() == []


def test_an_announcement_ends_with_its_connection(emptied: Daemon) -> None:
    with emptied.connect() as pool:
        (keys,) = only_on_ssd(emptied, pool, 1)
        with emptied.connect() as other:
            assert other.announce(keys).announced == CHAIN
            assert emptied.stats()["announcements"] == 1
        wait_until(lambda: emptied.stats()["announcements"] == 0, "the connection has ended")
        assert emptied.stats()["announced_bytes"] == 0
    assert emptied.problems() == []


def test_an_announcement_outlives_another_connections_use(emptied: Daemon) -> None:
    with emptied.connect() as pool, emptied.connect() as other:
        (keys,) = only_on_ssd(emptied, pool, 1)
        assert pool.announce(keys).announced == CHAIN
        assert load_all(other, keys)[0].chunks == CHAIN
        assert emptied.stats()["announcements"] == 1
        assert load_all(pool, keys)[0].chunks == CHAIN
        assert emptied.stats()["announcements"] == 0


def test_a_longer_request_uses_its_announced_prefix(emptied: Daemon) -> None:
    with emptied.connect() as pool:
        keys = keys_of(pool, 1, 6)
        store(pool, keys)
        assert (
            pool.announce(pool.keys(tokens_of(4001, 6 * SMALL.chunk_tokens)[: 3 * SMALL.chunk_tokens])).announced == 3
        )
        with pool.acquire(pool.lookup(keys)):
            assert emptied.stats()["announcements"] == 0
        assert pool.announce(keys) == kv.AnnounceResult(6, 0, 0)
        assert pool.announce(keys) == kv.AnnounceResult(6, 0, 0), "announced again"
        assert emptied.stats()["announcements"] == 1


def test_the_bounds_hold_and_a_flood_leaves_room_for_others(start: Start) -> None:
    daemon = start(dram__announced_ttl="1h", dram__announced_quota="0.5")
    with daemon.connect() as flooder, daemon.connect() as good:
        stored = only_on_ssd(daemon, good, 8)
        results = [flooder.announce(keys) for keys in stored for _ in range(3)]
        # Half of DRAM is 16 chunks; a connection has half of what the others leave.
        assert daemon.stats()["announced_bytes"] <= DRAM_CHUNKS // 4 * SMALL.chunk_bytes
        assert any(result.clipped for result in results)
        assert all(result.announced + result.clipped == CHAIN for result in results)
        assert good.announce(stored[-1]) == kv.AnnounceResult(CHAIN, 0, 0)
        wait_until(in_dram(good, stored[-1]), "the good client's chunks are in DRAM")
        assert store(good, keys_of(good, 77)).stored == CHAIN
    assert daemon.problems() == []


def test_no_announcement_is_accepted_where_the_share_is_0(start: Start) -> None:
    daemon = start(dram__announced_quota="0")
    with daemon.connect() as pool:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys) == kv.AnnounceResult(0, CHAIN, 0)
        assert daemon.stats()["announcements_clipped_chunks"] == CHAIN
        assert levels(pool, keys) == [Level.SSD] * CHAIN


def test_announced_chunks_without_room_are_promoted_once_there_is_room(start: Start) -> None:
    daemon = start(dram__announced_ttl="1h")
    with daemon.connect() as pool, daemon.connect() as holder:
        stored = only_on_ssd(daemon, pool, 1)
        held = fill(holder, range(100, 100 + DRAM_CHUNKS // CHAIN))
        leases = [holder.acquire(holder.lookup(keys)) for keys in held]
        assert pool.announce(stored[0]).announced == CHAIN
        assert not in_dram(pool, stored[0])()
        for lease in leases:
            lease.release()
        fill(holder, range(200, 201))
        wait_until(in_dram(pool, stored[0]), "there is room")
    assert daemon.problems() == []


def test_a_scheduler_announces_for_all_ranks(emptied: Daemon) -> None:
    base: dict[str, Any] = {
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float16",
        "chunk_tokens": 32,
        "world": 2,
    }
    ranks = [emptied.connect(kv.Layout(**base, rank=rank)) for rank in range(2)]
    with emptied.connect(kv.Layout(**base, rank=None)) as scheduler:
        tokens = tokens_of(9, CHAIN * 32)
        assert store(ranks[0], ranks[0].keys(tokens)).stored == CHAIN
        assert scheduler.announce(scheduler.keys(tokens)) == kv.AnnounceResult(0, 0, CHAIN)
        assert store(ranks[1], ranks[1].keys(tokens)).stored == CHAIN
        assert scheduler.announce(scheduler.keys(tokens)) == kv.AnnounceResult(CHAIN, 0, 0)
        assert emptied.stats()["announced_bytes"] == 2 * CHAIN * SMALL.chunk_bytes
        with scheduler.acquire(scheduler.lookup(scheduler.keys(tokens))):
            assert emptied.stats()["announcements"] == 0
    for pool in ranks:
        pool.close()
    assert emptied.problems() == []


def test_announcing_without_an_ssd_tier_protects_chunks_in_dram(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B")
    with daemon.connect() as pool:
        (keys,) = fill(pool, range(1))
        assert pool.announce(keys) == kv.AnnounceResult(CHAIN, 0, 0)
        fill(pool, range(100, 100 + 2 * DRAM_CHUNKS // CHAIN))
        assert in_dram(pool, keys)()
        assert pool.announce(keys_of(pool, 999)) == kv.AnnounceResult(0, 0, CHAIN)
    assert daemon.problems() == []


def test_an_announcement_without_a_daemon_is_absent(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = keys_of(pool, 1)
        daemon.kill()
        assert pool.announce(keys) == kv.AnnounceResult(0, 0, CHAIN)
