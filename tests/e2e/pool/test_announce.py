"""Announcements and demote hints: a waiting request's hit is in DRAM when it runs, all of it or nothing; idle chunks go first.

Within bounds, under any other use of DRAM, and in every layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.protocol.records.messages import KEYS_MAX
from kvpool.states import Level
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW, Case, over
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import assert_loads, assert_served, prompt, store

CHUNKS, PROMPTS = 4, 8  # of a prompt, and in DRAM
BOTH = over("plain", "hybrid")
Start = Callable[..., Daemon]
OPTIONS = {"dram.announced_quota": "1.0", "dram.announced_ttl": "1h", "ssd.capacity": "64MiB", "ssd.watermark": "1"}


def bytes_of(layout: kv.Layout, chunks: int = CHUNKS) -> int:
    """Of what a hit of so many chunks needs."""
    return sum(part.stored_bytes * part.chunks_of(chunks) for part in layout.group_layouts)


def options_of(layout: kv.Layout) -> dict[str, str]:
    return {**OPTIONS, "dram.capacity": f"{PROMPTS * bytes_of(layout)}B"}


@pytest.fixture
def start(start_daemon: Start, tmp_path: Path, case: Case) -> Start:
    """Starts a daemon with little DRAM over an SSD tier."""

    def make(**options: str) -> Daemon:
        given = {name.replace(".", "__"): value for name, value in options_of(case.layout).items()}
        daemon = start_daemon(**{**given, "ssd__path": str(tmp_path / "ssd"), **options})
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        return daemon

    return make


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One such daemon for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("lasting")
    with Daemon(
        directory, **{**options_of(HYBRID), "dram.capacity": "2MiB", "ssd.path": str(directory / "ssd")}
    ) as daemon:
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


def prompt_of(pool: kv.Pool, number: int, chunks: int = CHUNKS) -> kv.KeyChain:
    return prompt(pool, 4000 + number, chunks)


def fill(pool: kv.Pool, numbers: range) -> list[kv.KeyChain]:
    stored = [prompt_of(pool, number) for number in numbers]
    for keys in stored:
        assert store(pool, keys).declined == 0
    return stored


def levels(pool: kv.Pool, keys: kv.KeyChain) -> list[int]:
    """The slowest level of each chunk over the groups."""
    found: list[int] = pool.lookup(keys).tiers.tolist()
    return found


def only_on_ssd(daemon: Daemon, pool: kv.Pool, count: int) -> list[kv.KeyChain]:
    """Prompts that DRAM does not have."""
    stored = fill(pool, range(count))
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
    assert all(levels(pool, keys) == [Level.SSD] * CHUNKS for keys in stored)
    return stored


def are_in_dram(pool: kv.Pool, keys: kv.KeyChain) -> bool:
    return levels(pool, keys) == [Level.DRAM] * CHUNKS


def announcements(daemon: Daemon) -> tuple[int, int]:
    """How many there are, and their bytes."""
    stats = daemon.stats()
    return stats["announcements"], stats["announced_bytes"]


@BOTH
def test_an_announced_hit_is_promoted_and_survives_pressure_until_it_is_used(case: Case, start: Start) -> None:
    daemon = start()
    with daemon.connect(case.layout) as pool, daemon.connect(case.layout) as other:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys) == kv.AnnounceResult(CHUNKS, 0, 0)
        assert announcements(daemon) == (1, bytes_of(case.layout))
        wait_until(lambda: are_in_dram(pool, keys), "all of every group is in DRAM")
        fill(other, range(100, 100 + 2 * PROMPTS))
        assert are_in_dram(pool, keys)
        assert_served(pool, keys, CHUNKS)
        assert announcements(daemon) == (0, 0)
        fill(other, range(200, 200 + 2 * PROMPTS))
        assert set(levels(pool, keys)) == {Level.SSD}
    assert daemon.problems() == []


@BOTH
def test_an_unused_announcement_expires(case: Case, start: Start) -> None:
    daemon = start(dram__announced_ttl="100ms")
    with daemon.connect(case.layout) as pool:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys).announced == CHUNKS
        wait_until(lambda: announcements(daemon) == (0, 0), "the time is over")
        wait_until(lambda: daemon.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        fill(pool, range(100, 100 + 2 * PROMPTS))
        assert set(levels(pool, keys)) == {Level.SSD}
    assert daemon.problems() == []


@BOTH
def test_an_announcement_ends_with_its_connection_and_not_with_others_use(case: Case, emptied: Daemon) -> None:
    with emptied.connect(case.layout) as pool:
        (keys,) = only_on_ssd(emptied, pool, 1)
        with emptied.connect(case.layout) as other:
            assert other.announce(keys).announced == CHUNKS
            assert_served(pool, keys, CHUNKS)
            assert announcements(emptied)[0] == 1
            assert_served(other, keys, CHUNKS)
            assert announcements(emptied)[0] == 0
            assert other.announce(keys).announced == CHUNKS
        wait_until(lambda: announcements(emptied) == (0, 0), "the connection has ended")
    assert emptied.problems() == []


@BOTH
def test_an_announcement_is_renewed_extended_and_used_by_a_longer_hit(case: Case, emptied: Daemon) -> None:
    with emptied.connect(case.layout) as pool:
        keys = prompt_of(pool, 1, 8)
        store(pool, keys, [3, 8])
        for chunks in (3, 3, 8):
            assert pool.announce(keys, chunks).announced == chunks
            assert announcements(emptied)[0] == 1
        with pool.acquire(pool.lookup(keys, chunks_max=3)) as lease:
            assert lease.chunks == 3
            assert announcements(emptied)[0] == 1, "more is announced than was used"
        assert_served(pool, keys, 8)
        assert announcements(emptied) == (0, 0)
        assert pool.announce(keys, 3).announced == 3
        assert_served(pool, keys, 8)
        assert announcements(emptied) == (0, 0)
        assert pool.announce(prompt_of(pool, 2)) == kv.AnnounceResult(0, 0, CHUNKS)
    assert emptied.problems() == []


def test_the_boundary_that_serves_is_announced(emptied: Daemon) -> None:
    with emptied.connect(HYBRID) as pool:
        keys = prompt_of(pool, 1, 8)
        assert store(pool, keys, [3], chunks=6).declined == 0
        assert pool.announce(keys) == kv.AnnounceResult(3, 0, 5)
        assert pool.announce(keys, 2) == kv.AnnounceResult(0, 0, 2), "no boundary is before it"
        assert announcements(emptied)[0] == 1


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
                assert_loads(pool, keys, lease)
        assert announcements(emptied) == (0, 0)
    assert emptied.problems() == []


@BOTH
def test_a_hit_beyond_the_bounds_is_clipped_whole_and_a_flood_leaves_room_for_others(case: Case, start: Start) -> None:
    daemon = start(dram__announced_quota="0.5")
    with daemon.connect(case.layout) as flooder, daemon.connect(case.layout) as good:
        stored = only_on_ssd(daemon, good, 6)
        results = [flooder.announce(keys) for keys in stored for _ in range(3)]
        assert {(result.announced, result.clipped) for result in results} == {(CHUNKS, 0), (0, CHUNKS)}
        # Half of DRAM is four prompts; a connection has half of what the others leave.
        assert announcements(daemon) == (PROMPTS // 4, PROMPTS // 4 * bytes_of(case.layout))
        assert good.announce(stored[-1]).announced == CHUNKS
        wait_until(lambda: are_in_dram(good, stored[-1]), "the good client's chunks are in DRAM")
        assert store(good, prompt_of(good, 77)).declined == 0
    assert daemon.problems() == []


@BOTH
def test_no_announcement_is_accepted_where_the_share_is_0(case: Case, start: Start) -> None:
    daemon = start(dram__announced_quota="0")
    with daemon.connect(case.layout) as pool:
        (keys,) = only_on_ssd(daemon, pool, 1)
        assert pool.announce(keys) == kv.AnnounceResult(0, CHUNKS, 0)
        assert daemon.stats()["announcements_clipped_chunks"] > 0
        assert levels(pool, keys) == [Level.SSD] * CHUNKS


@BOTH
def test_a_hit_without_room_is_promoted_once_there_is_room(case: Case, start: Start) -> None:
    daemon = start()
    with daemon.connect(case.layout) as pool, daemon.connect(case.layout) as holder:
        (keys,) = only_on_ssd(daemon, pool, 1)
        held = fill(holder, range(100, 100 + PROMPTS))
        leases = [holder.acquire(holder.lookup(keys)) for keys in held]
        assert pool.announce(keys).announced == CHUNKS
        assert not are_in_dram(pool, keys)
        for lease in leases:
            lease.release()
        fill(holder, range(200, 201))
        wait_until(lambda: are_in_dram(pool, keys), "there is room")
    assert daemon.problems() == []


@BOTH
def test_a_scheduler_announces_for_all_ranks(case: Case, emptied: Daemon) -> None:
    ranks = [emptied.connect(replace(case.layout, rank=rank, world=2)) for rank in range(2)]
    with emptied.connect(replace(case.layout, rank=None, world=2)) as scheduler:
        keys = prompt_of(scheduler, 1)
        for rank, found in zip(ranks, (kv.AnnounceResult(0, 0, CHUNKS), kv.AnnounceResult(CHUNKS, 0, 0)), strict=True):
            store(rank, prompt_of(rank, 1))
            assert scheduler.announce(keys) == found
        assert announcements(emptied) == (1, 2 * bytes_of(case.layout))
        with scheduler.acquire(scheduler.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS
            assert announcements(emptied) == (0, 0)
    for pool in ranks:
        pool.close()
    assert emptied.problems() == []


def test_announcing_without_an_ssd_tier_protects_chunks_in_dram(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=options_of(HYBRID)["dram.capacity"])
    with daemon.connect(HYBRID) as pool:
        (keys,) = fill(pool, range(1))
        assert pool.announce(keys) == kv.AnnounceResult(CHUNKS, 0, 0)
        fill(pool, range(100, 100 + 2 * PROMPTS))
        assert are_in_dram(pool, keys)
    assert daemon.problems() == []


def test_the_longest_hit_of_many_groups_is_announced(start_daemon: Start) -> None:
    """A request names no window and no state but that before its end."""
    groups = (HYBRID.groups[FULL], *[kv.Group(kind="state", layers=1, state_bytes=16)] * 40)
    chunks = KEYS_MAX // len(groups) + 1
    daemon = start_daemon(dram__capacity="64MiB", dram__announced_quota="1.0")
    with daemon.connect(replace(HYBRID, groups=groups)) as pool:
        keys = prompt(pool, 1, chunks)
        assert store(pool, keys, [chunks]).declined == 0
        assert_served(pool, keys, chunks)
        assert pool.announce(keys) == kv.AnnounceResult(chunks, 0, 0)


@BOTH
def test_without_a_daemon_nothing_is_announced_demoted_retained_or_hinted(case: Case, daemon: Daemon) -> None:
    with daemon.connect(case.layout) as pool:
        keys = prompt_of(pool, 1)
        store(pool, keys)
        daemon.kill()
        wait_until(lambda: not pool.connected, "the daemon's end is seen")
        assert pool.announce(keys) == kv.AnnounceResult(0, 0, CHUNKS)
        assert pool.demote(keys).absent == CHUNKS
        assert pool.retain(keys, [kv.TokenRange(0)]).absent == CHUNKS
        (outcome,) = pool.hint(demote_hint("kv.pin"), keys).outcomes
        assert (outcome.status, outcome.reason) == ("rejected", "the daemon is away")


def demote_hint(kind: str = "kv.demote", **payload: object) -> dict[str, object]:
    """An envelope of one action."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


@BOTH
@pytest.mark.parametrize("first", [0, 2])
def test_demoted_chunks_of_every_group_are_written_and_evicted_first(case: Case, start: Start, first: int) -> None:
    daemon = start()
    with daemon.connect(case.layout) as pool:
        older, idle = fill(pool, range(2))
        assert daemon.stats()["ssd.chunks"] == 0
        assert [outcome.status for outcome in pool.hint(demote_hint(start=first * CHUNK), idle).outcomes] == [
            "accepted"
        ]
        stored = sum(map(len, pool.chunks_to_save(idle)))
        wait_until(lambda: daemon.stats()["ssd.chunks"] == stored, "what is stored is on disk")
        assert are_in_dram(pool, idle)
        number = 100
        while are_in_dram(pool, idle):
            number += 1
            assert number < 100 + 4 * PROMPTS, "nothing of it is evicted"
            store(pool, prompt_of(pool, number, 1))
        assert are_in_dram(pool, older)
        assert levels(pool, idle)[:first] == [Level.DRAM] * first
        assert_served(pool, idle, CHUNKS)
    assert daemon.problems() == []


@BOTH
def test_a_demote_hint_answers_for_full_chunks_and_repeats_nothing(case: Case, start: Start) -> None:
    daemon = start()
    with daemon.connect(case.layout) as pool:
        (keys,) = fill(pool, range(1))
        stored = sum(map(len, pool.chunks_to_save(keys)))
        for _ in range(2):
            assert pool.demote(keys).states == ("accepted",) * CHUNKS
            wait_until(lambda: daemon.stats()["ssd.chunks"] == stored, "what is stored is on disk")
        assert daemon.stats()["ssd.demoted_chunks"] == stored
        assert pool.demote(prompt_of(pool, 2)).states == ("absent",) * CHUNKS
        assert pool.demote(prompt_of(pool, 0, CHUNKS + 2)).absent == 2
    assert daemon.problems() == []
