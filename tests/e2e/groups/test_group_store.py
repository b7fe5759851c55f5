"""Chunks of groups in a shared store: published by one node, a hit on another that never met it, and a miss where it fails."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import seeking as sk
from kvpool.types import Level
from tests.e2e.remote.test_two_daemons import options_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import (
    CHUNK,
    FULL,
    HYBRID,
    STATE,
    WINDOW,
    WINDOW_CHUNKS,
    assert_served,
    key_of,
    load,
    payloads,
    store,
)
from tests.rigs.payload import tokens_of
from tests.rigs.runs.ports import free_port
from tests.rigs.store.scripted_store import SharedDirectory
from tests.rigs.store.store_daemon import StoreDaemon

CHUNKS = 10


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path)


@contextmanager
def node(shared: SharedDirectory, name: str = "here", **options: str) -> Iterator[tuple[StoreDaemon, kv.Pool]]:
    with (
        StoreDaemon(shared.path / name, shared, **options) as daemon,
        daemon.connect(HYBRID, timeout_s=10.0) as pool,
    ):
        yield daemon, pool
        assert daemon.problems() == []


def prompt(pool: kv.Pool, seed: int = 1) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, CHUNKS * CHUNK + 1))


def publish(shared: SharedDirectory, *boundaries: int) -> None:
    """Have another node publish the prompt with these boundaries."""
    with node(shared, "there", **{"store.publish": "all"}) as (daemon, pool):
        result = store(pool, prompt(pool), boundaries)
        daemon.wait_published(result.stored)


def object_of(shared: SharedDirectory, keys: kv.KeyChain, group: int, chunk: int) -> Path:
    return shared.objects()[key_of(keys, group, chunk).hex()]


def test_what_one_node_has_published_is_a_hit_on_a_node_that_never_met_it(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    assert len(shared.objects()) == CHUNKS + WINDOW_CHUNKS + 1
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        hit = pool.lookup(keys)
        assert (hit.chunks, hit.chunks_here) == (CHUNKS, 0)
        assert set(hit.tiers.tolist()) == {Level.STORE}
        assert_served(pool, keys, CHUNKS)
        wait_until(lambda: set(pool.lookup(keys).tiers.tolist()) == {Level.DRAM}, "the chunks have landed")
        assert daemon.stats()["store.pulled_chunks"] == CHUNKS + WINDOW_CHUNKS + 1


@pytest.mark.parametrize("boundary", [4, CHUNKS])
def test_a_hit_goes_on_over_what_is_here_and_the_store(shared: SharedDirectory, boundary: int) -> None:
    publish(shared, 4, CHUNKS)
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        store(pool, keys, [boundary], chunks=boundary)
        assert_served(pool, keys, CHUNKS)
        if boundary == CHUNKS:
            assert daemon.stats()["store.questions"] == 0, "all of it is here"


def test_windows_of_the_store_serve_full_chunks_that_are_here(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        store(pool, keys, [4])
        assert pool.groups.lookup(keys, 4).chunks == 4
        assert_served(pool, keys, CHUNKS)
        assert daemon.stats()["store.pulled_chunks"] == WINDOW_CHUNKS + 1


@pytest.mark.parametrize(("group", "chunk"), [(FULL, 8), (WINDOW, 8), (STATE, 9)])
def test_what_is_there_in_part_is_the_hit_of_the_boundary_before(
    shared: SharedDirectory, group: int, chunk: int
) -> None:
    publish(shared, 4, CHUNKS)
    with node(shared) as (_, pool):
        keys = prompt(pool)
        object_of(shared, keys, group, chunk).unlink()
        hit = pool.lookup(keys)
        assert isinstance(hit, kv.GroupHit)
        assert (hit.chunks, hit.full_chunks) == (4, 8 if group == FULL else CHUNKS)
        assert_served(pool, keys, 4)


def _flip(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[-1] ^= 1
    path.write_bytes(value)


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _other_group(path: Path) -> None:
    """A chunk of another group, good in itself."""
    size = path.stat().st_size
    path.write_bytes(next(one for one in path.parent.iterdir() if one.stat().st_size != size).read_bytes())


def _other_chunk(path: Path) -> None:
    """Another chunk of the same group, good in itself."""
    size = path.stat().st_size
    others = [one for one in path.parent.iterdir() if one.stat().st_size == size and one != path]
    path.write_bytes(others[0].read_bytes())


@pytest.mark.parametrize(
    ("group", "spoil", "count"),
    [
        (FULL, _flip, "wrong_objects"),
        (WINDOW, _flip, "wrong_objects"),
        pytest.param(STATE, _flip, "wrong_objects", marks=pytest.mark.slow),
        pytest.param(STATE, _other_chunk, "wrong_objects", marks=pytest.mark.slow),
        pytest.param(WINDOW, _other_group, "absent_objects", marks=pytest.mark.slow),
        pytest.param(STATE, _shorten, "absent_objects", marks=pytest.mark.slow),
    ],
)
def test_wrong_bytes_in_the_store_are_refused_and_the_boundary_before_serves(
    shared: SharedDirectory, group: int, spoil: Callable[[Path], None], count: str
) -> None:
    publish(shared, 4, CHUNKS)
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        spoil(object_of(shared, keys, group, 9))
        with pool.acquire(pool.lookup(keys)) as lease:
            if lease:
                assert load(pool, lease)[0].chunks in (0, 4)
        wait_until(lambda: daemon.stats()[f"store.{count}"] > 0, "the object is refused")
        assert_served(pool, keys, 4)


@pytest.mark.slow
def test_a_chunk_that_leaves_the_store_after_the_lookup_is_no_wrong_byte(shared: SharedDirectory) -> None:
    publish(shared, 4, CHUNKS)
    with node(shared) as (_, pool):
        keys = prompt(pool)
        hit = pool.lookup(keys)
        assert hit.chunks == CHUNKS
        object_of(shared, keys, STATE, 9).unlink()
        with pool.acquire(hit) as lease:
            result = load(pool, lease)[0]
        assert result.chunks in (0, 4)
        assert_served(pool, keys, 4)


def test_a_false_exists_is_a_miss_and_the_prompt_is_saved(shared: SharedDirectory) -> None:
    shared.play(exists=True)
    with node(shared) as (_, pool):
        keys = prompt(pool)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert load(pool, lease)[0].chunks == 0
        shared.play()
        assert store(pool, keys).declined == 0
        assert_served(pool, keys, CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("script", [{"exist_code": -900}, {"get_code": -800}, {"aborts": True}])
def test_a_store_that_fails_is_a_miss_and_serves_later(shared: SharedDirectory, script: dict[str, object]) -> None:
    publish(shared, CHUNKS)
    with node(shared) as (_, pool):
        keys = prompt(pool)
        shared.play(**script)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert load(pool, lease)[0].chunks == 0
        shared.play()

        def is_served() -> bool:
            with pool.acquire(pool.lookup(keys)) as lease:
                return lease.chunks == CHUNKS and load(pool, lease)[0].reason == "complete"

        wait_until(is_served, "the store serves again")


def test_a_late_answer_is_a_miss_now_and_counts_for_the_next_lookup(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    with node(shared, **{"store.answer_timeout": "1ms"}) as (daemon, pool):
        keys = prompt(pool)
        shared.play(exist_delay_s=0.2)
        assert pool.lookup(keys).chunks == 0
        assert daemon.stats()["store.late_answers"] > 0
        shared.play()
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the answers have come")
        assert_served(pool, keys, CHUNKS)


def test_a_client_with_less_time_than_the_store_has_suspends_it_for_nobody(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    with node(shared) as (daemon, pool), daemon.connect(HYBRID) as hasty:
        session = hasty._link.session
        assert session is not None
        counts = np.ones(len(HYBRID.parts), "<u4").tobytes()
        for number in range(8):
            asked = hasty.keys(tokens_of(100 + number, CHUNK))
            session.call(sk.SeekEach(counts, b"".join(asked.columns()), 1e-9), sk.SoughtEach)
        assert (daemon.stats()["store.state"], daemon.stats()["store.late_answers"]) == ("ok", 0)
        assert pool.lookup(prompt(pool)).chunks == CHUNKS


@pytest.mark.slow
def test_a_node_killed_while_it_fetches_leaves_nothing_wrong(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        hit = pool.lookup(keys)
        shared.play(delay_s=0.5)
        with pool.acquire(hit) as lease:
            daemon.kill()
            assert load(pool, lease)[0].chunks == 0
        assert pool.lookup(keys).chunks == 0
        shared.play()
        daemon.start()
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the pool is connected again")
        assert_served(pool, keys, CHUNKS)


@pytest.mark.slow
def test_chunks_that_do_not_fit_the_stores_memory_are_a_miss(shared: SharedDirectory) -> None:
    """No lease could fetch them."""
    shared.play(exists=True)
    large = replace(HYBRID, groups=(*HYBRID.groups[:STATE], kv.Group(kind="state", layers=1, state_bytes=2 << 20)))
    with node(shared, **{"store.buffer": "1MiB"}) as (daemon, _), daemon.connect(large) as pool:
        hit = pool.lookup(prompt(pool))
        assert isinstance(hit, kv.GroupHit)
        assert (hit.chunks, hit.full_chunks) == (0, CHUNKS)


def test_reused_chunks_of_groups_are_published_after_their_lease_and_no_others(shared: SharedDirectory) -> None:
    with node(shared, **{"store.publish": "reused"}) as (daemon, pool):
        keys = prompt(pool)
        store(pool, keys, [4, CHUNKS])
        with pool.acquire(pool.groups.lookup(keys, 4)) as lease:
            assert lease.chunks == 4
        daemon.wait_published(4 + WINDOW_CHUNKS + 1)
        named = {key_of(keys, FULL, chunk).hex() for chunk in range(4)}
        named |= {key_of(keys, group, chunk).hex() for group, chunk in ((WINDOW, 2), (WINDOW, 3), (STATE, 3))}
        assert set(shared.objects()) == named


def test_a_hit_is_joined_from_another_node_and_the_store(shared: SharedDirectory) -> None:
    """The other node has full chunks, the store windows and states."""
    publish(shared, CHUNKS)
    ports = free_port(), free_port()
    (shared.path / "owner").mkdir()
    with (
        Daemon(shared.path / "owner", **options_of("owner", *ports)) as owner,
        owner.connect(HYBRID) as other,
        node(shared, **options_of("here", *reversed(ports))) as (daemon, pool),
    ):
        keys = prompt(pool)
        for chunk in range(CHUNKS):
            object_of(shared, keys, FULL, chunk).unlink()
        store(other, keys, [4])
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the other node's chunks are known")
        assert set(pool.lookup(keys).tiers.tolist()) == {Level.PEER, Level.STORE}
        assert_served(pool, keys, CHUNKS)
        assert daemon.stats()["peer.pulled_chunks"] == CHUNKS
        assert daemon.stats()["store.pulled_chunks"] == WINDOW_CHUNKS + 1


def test_a_prompt_that_is_here_is_not_asked_of_the_store(shared: SharedDirectory) -> None:
    with node(shared) as (daemon, pool):
        keys = prompt(pool)
        store(pool, keys)
        for _ in range(3):
            assert_served(pool, keys, CHUNKS)
        assert daemon.stats()["store.questions"] == 0


@pytest.mark.slow
def test_random_prompts_over_two_nodes_and_a_spoiled_store_have_right_bytes(shared: SharedDirectory, seed: int) -> None:
    chance = random.Random(seed)
    options = {"store.publish": "all"}
    with node(shared, "a", **options) as (one, first), node(shared, "b", **options) as (other, second):
        chains = [prompt(first, 10 + number) for number in range(5)]
        loaded = 0
        for _ in range(60):
            pool, keys, act = chance.choice((first, second)), chance.choice(chains), chance.random()
            if act < 0.5:
                with pool.acquire(pool.lookup(keys)) as lease:
                    if lease:
                        result, found = load(pool, lease)
                        assert result.chunks in (0, lease.chunks)
                        if result.reason == "complete":
                            loaded += 1
                            assert isinstance(lease, kv.GroupLease)
                            for right, here in zip(payloads(keys, HYBRID, lease.ranges), found, strict=True):
                                assert np.array_equal(right, here)
            elif act < 0.8:
                end = chance.randrange(1, CHUNKS + 1)
                store(pool, keys, [end, chance.randrange(1, end + 1)], chunks=end)
            elif act < 0.9:
                with chance.choice((one, other)).admin() as operator:
                    operator.flush("test-model", None)
            elif objects := sorted(shared.objects().values()):
                ways: list[Callable[[Path], object]] = [_flip, _shorten, Path.unlink]
                chance.choice(ways)(chance.choice(objects))
        print(f"{loaded} loads")
