"""Announcements and demote hints of layouts with groups.

What a hit needs of each group is in DRAM when its request runs, all of it or nothing. What is stored of demoted chunks is on
disk, and is evicted first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.types import Level
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import CHUNK, FULL, HYBRID, STATE, WINDOW, WINDOW_CHUNKS, assert_served, load, store
from tests.rigs.payload import tokens_of

CHUNKS = 4
PROMPT_BYTES = sum(
    count * part.chunk_bytes for count, part in zip((CHUNKS, WINDOW_CHUNKS, 1), HYBRID.group_layouts, strict=True)
)
PROMPTS = 8  # in DRAM
Start = Callable[..., Daemon]


OPTIONS = {
    "dram.capacity": f"{PROMPTS * PROMPT_BYTES}B",
    "dram.announced_quota": "1.0",
    "dram.announced_ttl": "1h",
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
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One such daemon for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("started")
    with Daemon(directory, **{**OPTIONS, "ssd.path": str(directory / "ssd")}) as daemon:
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        yield daemon


@pytest.fixture
def emptied(started: Daemon) -> Daemon:
    """The same, with nothing in it."""
    wait_until(lambda: started.stats()["announcements"] == 0, "the connections of other tests have ended")
    wait_until(lambda: started.stats()["ssd.promotions_under_way"] == 0, "so have their promotions")
    with started.admin() as admin:
        admin.flush(None, None)
    return started


def prompt(pool: kv.Pool, number: int, chunks: int = CHUNKS) -> kv.KeyChain:
    return pool.keys(tokens_of(4000 + number, chunks * CHUNK + 1))


def fill(pool: kv.Pool, numbers: range) -> list[kv.KeyChain]:
    stored = [prompt(pool, number) for number in numbers]
    for keys in stored:
        assert store(pool, keys).declined == 0
    return stored


def levels(pool: kv.Pool, keys: kv.KeyChain) -> list[int]:
    """The slowest level of each chunk over the groups."""
    found: list[int] = pool.lookup(keys).tiers.tolist()
    return found


def demote_all(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")


def only_on_ssd(daemon: Daemon, pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    """Prompts that DRAM does not have."""
    stored = fill(pool, range(count))
    demote_all(daemon)
    assert all(levels(pool, keys) == [Level.SSD] * CHUNKS for keys in stored)
    return stored


def wait_in_dram(pool: kv.Pool, keys: kv.KeyChain, chunks: int = CHUNKS) -> None:
    wait_until(lambda: levels(pool, keys) == [Level.DRAM] * chunks, "all of every group is in DRAM")


def announcements(daemon: Daemon) -> tuple[int, int]:
    """How many there are, and their bytes."""
    stats = daemon.stats()
    return stats["announcements"], stats["announced_bytes"]


def test_an_announced_hit_is_promoted_and_survives_pressure_until_it_is_used(start: Start) -> None:
    daemon = start()
    with daemon.connect(HYBRID) as pool, daemon.connect(HYBRID) as other:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys) == kv.AnnounceResult(CHUNKS, 0, 0)
        assert announcements(daemon) == (1, PROMPT_BYTES)
        wait_in_dram(pool, keys)
        fill(other, range(100, 100 + 2 * PROMPTS))
        assert levels(pool, keys) == [Level.DRAM] * CHUNKS
        assert_served(pool, keys, CHUNKS)
        assert announcements(daemon) == (0, 0)
        fill(other, range(200, 200 + 2 * PROMPTS))
        assert set(levels(pool, keys)) == {Level.SSD}
    assert daemon.problems() == []


def test_the_boundary_that_serves_is_announced(emptied: Daemon) -> None:
    with emptied.connect(HYBRID) as pool:
        keys = prompt(pool, 1, 8)
        assert store(pool, keys, [3], chunks=6).declined == 0
        assert pool.announce(keys) == kv.AnnounceResult(3, 0, 5)
        assert pool.announce(keys, 2) == kv.AnnounceResult(0, 0, 2), "no boundary is before it"
        assert pool.announce(prompt(pool, 2)) == kv.AnnounceResult(0, 0, CHUNKS)
        assert announcements(emptied)[0] == 1


def test_an_announcement_is_renewed_and_extended(emptied: Daemon) -> None:
    with emptied.connect(HYBRID) as pool:
        keys = prompt(pool, 1, 8)
        store(pool, keys, [3, 8])
        assert pool.announce(keys, 3).announced == 3
        assert pool.announce(keys, 3).announced == 3
        assert announcements(emptied)[0] == 1
        assert pool.announce(keys).announced == 8
        assert announcements(emptied)[0] == 1
        with pool.acquire(pool.lookup(keys, chunks_max=3)) as lease:
            assert lease.chunks == 3
            assert announcements(emptied)[0] == 1, "more is announced than was used"
        assert_served(pool, keys, 8)
        assert announcements(emptied) == (0, 0)
    assert emptied.problems() == []


def test_a_longer_hit_uses_what_was_announced(emptied: Daemon) -> None:
    with emptied.connect(HYBRID) as pool:
        keys = prompt(pool, 1, 8)
        store(pool, keys, [3, 8])
        assert pool.announce(keys, 3).announced == 3
        assert_served(pool, keys, 8)
        assert announcements(emptied) == (0, 0)


@pytest.mark.parametrize("order", [(WINDOW, STATE), (STATE, WINDOW), (WINDOW, FULL), (STATE, WINDOW, FULL)])
def test_groups_of_any_order_are_announced_and_used(emptied: Daemon, order: tuple[int, ...]) -> None:
    layout = replace(HYBRID, groups=tuple(HYBRID.groups[number] for number in order))
    with emptied.connect(layout) as pool:
        keys = pool.keys(tokens_of(1, 8 * CHUNK + 1))
        store(pool, keys, [3, 8])
        assert pool.announce(keys, 3) == kv.AnnounceResult(3, 0, 0)
        assert pool.announce(keys) == kv.AnnounceResult(8, 0, 0)
        # Without a full group nothing names a boundary that is further back than the first group reaches.
        assert announcements(emptied)[0] == (1 if FULL in order else 2)
        for chunks in (3, 8):
            with pool.acquire(pool.lookup(keys, chunks_max=chunks)) as lease:
                assert load(pool, lease)[0].reason == "complete"
        assert announcements(emptied) == (0, 0)
    assert emptied.problems() == []


def test_an_unused_announcement_expires(start: Start) -> None:
    daemon = start(dram__announced_ttl="100ms")
    with daemon.connect(HYBRID) as pool:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys).announced == CHUNKS
        wait_until(lambda: announcements(daemon) == (0, 0), "the time is over")
        wait_until(lambda: daemon.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        fill(pool, range(100, 100 + 2 * PROMPTS))
        assert set(levels(pool, keys)) == {Level.SSD}
    assert daemon.problems() == []


def test_an_announcement_ends_with_its_connection_and_not_with_others_use(emptied: Daemon) -> None:
    with emptied.connect(HYBRID) as pool:
        (keys,) = only_on_ssd(emptied, pool, 1)
        with emptied.connect(HYBRID) as other:
            assert other.announce(keys).announced == CHUNKS
            assert_served(pool, keys, CHUNKS)
            assert announcements(emptied)[0] == 1
        wait_until(lambda: announcements(emptied) == (0, 0), "the connection has ended")
    assert emptied.problems() == []


def test_a_hit_beyond_the_bounds_is_clipped_whole(start: Start) -> None:
    daemon = start(dram__announced_quota="0.5")
    with daemon.connect(HYBRID) as flooder, daemon.connect(HYBRID) as good:
        stored = only_on_ssd(daemon, good, 6)
        results = [flooder.announce(keys) for keys in stored for _ in range(3)]
        assert {(result.announced, result.clipped) for result in results} == {(CHUNKS, 0), (0, CHUNKS)}
        # Half of DRAM is four prompts; a connection has half of what the others leave.
        assert announcements(daemon) == (PROMPTS // 4, PROMPTS // 4 * PROMPT_BYTES)
        assert good.announce(stored[-1]).announced == CHUNKS
        wait_in_dram(good, stored[-1])
        assert store(good, prompt(good, 77)).declined == 0
    assert daemon.problems() == []


def test_a_hit_without_room_is_promoted_once_there_is_room(start: Start) -> None:
    daemon = start()
    with daemon.connect(HYBRID) as pool, daemon.connect(HYBRID) as holder:
        (keys,) = only_on_ssd(daemon, pool, 1)
        held = fill(holder, range(100, 100 + PROMPTS))
        leases = [holder.acquire(holder.lookup(keys)) for keys in held]
        assert pool.announce(keys).announced == CHUNKS
        assert levels(pool, keys) != [Level.DRAM] * CHUNKS
        for lease in leases:
            lease.release()
        fill(holder, range(200, 201))
        wait_in_dram(pool, keys)
    assert daemon.problems() == []


def test_a_scheduler_announces_for_all_ranks(emptied: Daemon) -> None:
    ranks = [emptied.connect(replace(HYBRID, rank=rank, world=2)) for rank in range(2)]
    with emptied.connect(replace(HYBRID, rank=None, world=2)) as scheduler:
        keys = prompt(scheduler, 1)
        store(ranks[0], prompt(ranks[0], 1))
        assert scheduler.announce(keys) == kv.AnnounceResult(0, 0, CHUNKS)
        store(ranks[1], prompt(ranks[1], 1))
        assert scheduler.announce(keys) == kv.AnnounceResult(CHUNKS, 0, 0)
        assert announcements(emptied) == (1, 2 * PROMPT_BYTES)
        with scheduler.acquire(scheduler.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS
            assert announcements(emptied) == (0, 0)
    for pool in ranks:
        pool.close()
    assert emptied.problems() == []


def test_a_daemon_that_is_away_or_without_memory_for_it_announces_nothing(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        daemon.kill()
        assert pool.announce(keys) == kv.AnnounceResult(0, 0, CHUNKS)
        assert pool.demote(keys).absent == CHUNKS


@pytest.mark.parametrize("first", [0, 2])
def test_demoted_chunks_of_every_group_are_written_and_evicted_first(start: Start, first: int) -> None:
    daemon = start(ssd__watermark="1")
    with daemon.connect(HYBRID) as pool:
        older, idle = fill(pool, range(2))
        assert daemon.stats()["ssd.chunks"] == 0
        action = {"action_id": "a", "action_type": "kv.demote", "action_version": "1.0"}
        hint = {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [{**action, "payload": {"start": first * CHUNK}}],
        }
        assert [outcome.status for outcome in pool.hint(hint, idle).outcomes] == ["accepted"]
        wait_until(lambda: daemon.stats()["ssd.chunks"] == CHUNKS + WINDOW_CHUNKS + 1, "what is stored is on disk")
        assert levels(pool, idle) == [Level.DRAM] * CHUNKS
        number = 100
        while levels(pool, idle) == [Level.DRAM] * CHUNKS:
            number += 1
            assert number < 100 + 4 * PROMPTS, "nothing of it is evicted"
            store(pool, prompt(pool, number, 1))
        assert levels(pool, older) == [Level.DRAM] * CHUNKS
        assert levels(pool, idle)[:first] == [Level.DRAM] * first
        assert_served(pool, idle, CHUNKS)
    assert daemon.problems() == []


def test_a_demote_hint_answers_for_full_chunks_and_repeats_nothing(start: Start) -> None:
    daemon = start(ssd__watermark="1")
    with daemon.connect(HYBRID) as pool:
        (keys,) = fill(pool, range(1))
        for _ in range(2):
            assert pool.demote(keys).states == ("accepted",) * CHUNKS
            wait_until(lambda: daemon.stats()["ssd.chunks"] == CHUNKS + WINDOW_CHUNKS + 1, "what is stored is on disk")
        assert daemon.stats()["ssd.demoted_chunks"] == CHUNKS + WINDOW_CHUNKS + 1
        assert pool.demote(prompt(pool, 2)).states == ("absent",) * CHUNKS
        longer = prompt(pool, 0, CHUNKS + 2)
        assert pool.demote(longer).absent == 2
    assert daemon.problems() == []
