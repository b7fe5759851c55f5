"""Chunks of groups on other nodes: a hit over both, fetched with the lease, and a shorter one or none where they are gone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.types import Level
from kvpool_client.verbs.store_search import ELSEWHERE_MAX
from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import CHUNK, HYBRID, WINDOW_CHUNKS, assert_served, load, store
from tests.rigs.payload import tokens_of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """Two daemons of the tests that end neither of them; each test has a model of its own."""
    with two_daemons(tmp_path_factory.mktemp("pair")) as daemons:
        yield daemons


@contextmanager
def pools(pair: tuple[Daemon, Daemon], model: str) -> Iterator[tuple[kv.Pool, kv.Pool]]:
    owner, here = pair
    arguments = {"model": model, "timeout_s": 20.0}
    with owner.connect(HYBRID, **arguments) as there, here.connect(HYBRID, **arguments) as pool:
        yield there, pool


def wait_known(pool: kv.Pool, keys: kv.KeyChain, chunks: int) -> None:
    wait_until(lambda: pool.lookup(keys).chunks == chunks, f"{chunks} chunks are known")


def flush(daemon: Daemon, model: str = "test-model") -> None:
    with daemon.admin() as operator:
        operator.flush(model, None)


def test_what_one_node_has_stored_is_a_hit_on_the_other(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    with pools(pair, "stored") as (there, pool):
        keys = pool.keys(tokens_of(1, 10 * CHUNK + 1))
        before = here.stats()["peer.pulled_chunks"]
        store(there, keys)
        wait_known(pool, keys, 10)
        hit = pool.lookup(keys)
        assert set(hit.tiers.tolist()) == {Level.PEER}
        assert hit.chunks_here == 0
        assert_served(pool, keys, 10)
        wait_until(lambda: set(pool.lookup(keys).tiers.tolist()) == {Level.DRAM}, "all of it is here")
        assert here.stats()["peer.pulled_chunks"] - before == 10 + WINDOW_CHUNKS + 1
        flush(owner, "stored")
        assert_served(pool, keys, 10)
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's leases have ended")


def test_a_hit_goes_on_over_both_nodes(pair: tuple[Daemon, Daemon]) -> None:
    """Each node has what the other one lacks."""
    with pools(pair, "both") as (there, pool):
        for boundary in (4, 10):
            keys = pool.keys(tokens_of(boundary, 10 * CHUNK + 1))
            store(pool, keys, [4], chunks=4)
            store(there, keys, [boundary])
            wait_known(pool, keys, boundary)
            assert_served(pool, keys, boundary)


def test_a_node_that_ends_between_lookup_and_acquire_leaves_the_hit_on_this_one(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as daemons, pools(daemons, "test-model") as (there, pool):
        owner, _ = daemons
        keys = pool.keys(tokens_of(3, 10 * CHUNK + 1))
        store(pool, keys, [4], chunks=4)
        store(there, keys, [10])
        wait_known(pool, keys, 10)
        hit = pool.lookup(keys)
        owner.kill()
        with pool.acquire(hit) as lease:
            assert lease.chunks in (4, 10)  # 10 where the node seems to be there still: then the load ends short
            result = load(pool, lease)[0]
        assert result.chunks <= lease.chunks

        def is_served_here() -> bool:
            with pool.acquire(pool.lookup(keys)) as lease:
                return lease.chunks == 4 and load(pool, lease)[0].reason == "complete"

        wait_until(is_served_here, "what is here is leased, though more is thought to be elsewhere")


def test_a_bad_chunk_on_another_node_leaves_the_boundary_before_it(pair: tuple[Daemon, Daemon]) -> None:
    owner, _ = pair
    with pools(pair, "bad") as (there, pool):
        keys = pool.keys(tokens_of(5, 10 * CHUNK + 1))
        store(there, keys, [4, 10])
        wait_known(pool, keys, 10)
        with there.acquire(there.lookup(keys)) as lease:  # the last row is the state's
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[int(lease.hold.rows.offsets[-1]) + 7] ^= 1

        def is_shorter() -> bool:
            with pool.acquire(pool.lookup(keys)) as lease:
                return lease.chunks == 4 and load(pool, lease)[0].chunks == 4

        wait_until(is_shorter, "the boundary before is leased and loaded")
        wait_until(lambda: owner.stats()["checksum_failures"] == 1, "the owner has compared it, and dropped it")
        assert owner.problems() == []


def test_a_hit_of_many_windows_elsewhere_is_of_this_nodes_chunks(tmp_path: Path) -> None:
    """The lease would wait too long for all of them."""
    windows = ELSEWHERE_MAX + 1
    many = kv.Layout(
        chunk_tokens=CHUNK,
        groups=(
            kv.Group(layers=1, kv_heads=1, head_dim=16, dtype="float16"),
            kv.Group(kind="window", window=windows * CHUNK, layers=1, kv_heads=1, head_dim=16, dtype="float16"),
        ),
    )
    with two_daemons(tmp_path) as (owner, here), owner.connect(many) as there, here.connect(many) as pool:
        keys = pool.keys(tokens_of(6, windows * CHUNK + 1))
        store(there, keys, [windows])
        wait_until(lambda: int(here.stats()["peer.known_chunks"]) == 2 * windows, "they are known")
        assert pool.lookup(keys).chunks == 0
        store(pool, keys, [1], chunks=1)
        assert pool.lookup(keys).chunks == windows, "one of them is here now"
        assert_served(pool, keys, windows)


def test_what_is_dropped_on_its_node_after_the_lookup_is_no_wrong_byte(pair: tuple[Daemon, Daemon]) -> None:
    owner, _ = pair
    with pools(pair, "dropped") as (there, pool):
        keys = pool.keys(tokens_of(4, 10 * CHUNK + 1))
        store(there, keys)
        wait_known(pool, keys, 10)
        hit = pool.lookup(keys)
        flush(owner, "dropped")
        with pool.acquire(hit) as lease:
            assert load(pool, lease)[0].chunks in (0, lease.chunks)
        wait_until(lambda: pool.lookup(keys).chunks == 0, "it is known that they are gone")
        store(pool, keys)
        assert_served(pool, keys, 10)


@pytest.mark.parametrize("steps", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_prompts_over_two_nodes_have_right_bytes(tmp_path: Path, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    with two_daemons(tmp_path) as nodes:
        connected = [node.connect(HYBRID, timeout_s=20.0) for node in nodes]
        chains = [connected[0].keys(tokens_of(10 + number, 12 * CHUNK + 1)) for number in range(3)]
        loaded = 0
        for _ in range(steps):
            pool, keys = chance.choice(connected), chance.choice(chains)
            hit = pool.lookup(keys)
            if hit.chunks and chance.random() < 0.6:
                with pool.acquire(hit) as lease:
                    result, _ = load(pool, lease)
                    if result.reason == "complete" and lease.chunks == hit.chunks:
                        loaded += 1
                        assert_served(pool, keys, pool.lookup(keys).chunks)
            else:
                end = chance.randrange(1, 13)
                store(pool, keys, [end, chance.randrange(1, end + 1)], chunks=end)
            if chance.random() < 0.05:
                flush(chance.choice(nodes))
        print(f"{loaded} loads")
        for pool in connected:
            pool.close()
