"""Prompts on other nodes, in every layout: a hit over both, fetched with the lease; a shorter one or none where they fail."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.states import Level
from kvpool_client.verbs.store_search import ELSEWHERE_MAX
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CASES, CHUNK, Case, over
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.prompts import Ranks, assert_loads, assert_served, flip, load, prompt, store

CHUNKS = 10
SOME = over("plain", "hybrid", "divided")
Pair = tuple[Daemon, Daemon]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two daemons of the tests that end neither of them; each test has a model of its own."""
    with two_daemons(tmp_path_factory.mktemp("pair")) as daemons:
        yield daemons


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[str(request.param)]


@contextmanager
def ranks_of(pair: Pair, case: Case, model: str = "test-model") -> Iterator[tuple[Ranks, Ranks]]:
    """Those of a row on the node that owns chunks, and on this one."""

    def of(daemon: Daemon) -> Ranks:
        return Ranks(case, lambda layout, share: daemon.connect(layout, share=share, model=model, timeout_s=20.0))

    with of(pair[0]) as there, of(pair[1]) as here:
        yield there, here


def wait_known(pool: kv.Pool, keys: kv.KeyChain, chunks: int = CHUNKS) -> None:
    wait_until(lambda: pool.lookup(keys).chunks == chunks, f"{chunks} chunks are known")


def flush(daemon: Daemon, model: str = "test-model") -> None:
    with daemon.admin() as operator:
        operator.flush(model, None)


@over(*(name for name in CASES if name != "windows"))
def test_what_one_node_has_stored_is_a_hit_on_the_other_until_it_is_dropped(
    pair: Pair, case: Case, request: pytest.FixtureRequest
) -> None:
    owner, here = pair
    model = request.node.name
    with ranks_of(pair, case, model) as (there, ranks):
        keys, other = there.prompt(1, CHUNKS), there.prompt(2, CHUNKS)
        before = here.stats()["peer.pulled_chunks"]
        for each in (keys, other):
            there.store(each)
            wait_known(ranks.first, each)
        hit = ranks.first.lookup(keys)
        assert (set(hit.tiers.tolist()), hit.chunks_here) == ({Level.PEER}, 0)
        ranks.assert_served(keys, CHUNKS)
        wait_until(lambda: set(ranks.first.lookup(keys).tiers.tolist()) == {Level.DRAM}, "all of it is here")
        assert here.stats()["peer.pulled_chunks"] - before == there.needed(keys)
        flush(owner, model)
        ranks.assert_served(keys, CHUNKS)
        wait_known(ranks.first, other, 0)
        ranks.store(other)
        ranks.assert_served(other, CHUNKS)
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's leases have ended")


@SOME
def test_a_hit_goes_on_over_both_nodes(pair: Pair, case: Case) -> None:
    """Each node has what the other one lacks."""
    with ranks_of(pair, case, "both") as (there, ranks):
        for boundary in (4, CHUNKS):
            keys = there.prompt(boundary, CHUNKS)
            ranks.store(keys, [4], chunks=4)
            there.store(keys, [boundary])
            found = boundary if case.has_windows else CHUNKS
            wait_known(ranks.first, keys, found)
            ranks.assert_served(keys, found)


@SOME
def test_a_node_that_ends_between_lookup_and_acquire_leaves_the_hit_on_this_one(case: Case, tmp_path: Path) -> None:
    with two_daemons(tmp_path) as daemons, ranks_of(daemons, case) as (there, ranks):
        pool, keys = ranks.first, there.prompt(3, CHUNKS)
        ranks.store(keys, [4], chunks=4)
        there.store(keys, [CHUNKS])
        wait_known(pool, keys)
        hit = pool.lookup(keys)
        daemons[0].kill()
        with pool.acquire(hit) as lease:
            assert lease.chunks in (4, CHUNKS)  # all where the node seems to be there still: then the load ends short
            assert load(pool, lease)[0].chunks <= lease.chunks

        def is_served_here() -> bool:
            with pool.acquire(pool.lookup(keys)) as lease:
                return lease.chunks == 4 and load(pool, lease)[0].reason == "complete"

        wait_until(is_served_here, "what is here is leased, though more is thought to be elsewhere")


@SOME
def test_a_bad_chunk_on_another_node_leaves_what_is_before_it(pair: Pair, case: Case) -> None:
    owner, _ = pair
    with ranks_of(pair, case, "bad") as (there, ranks):
        pool, keys = ranks.first, there.prompt(5, CHUNKS)
        there.store(keys, [4, CHUNKS])
        wait_known(pool, keys)
        bad = owner.stats()["checksum_failures"]
        with there.first.acquire(there.first.lookup(keys)) as lease:
            flip(lease, -1, 7)  # the last chunk, or the state
        good = 4 if case.has_windows else CHUNKS - 1

        def is_shorter() -> bool:
            with pool.acquire(pool.lookup(keys)) as lease:
                return lease.chunks == good and load(pool, lease)[0].chunks == good

        wait_until(is_shorter, "what is before it is leased and loaded")
        wait_until(lambda: owner.stats()["checksum_failures"] == bad + 1, "the owner has compared it, and dropped it")
        assert owner.problems() == []


def test_a_hit_of_many_windows_elsewhere_is_of_this_nodes_chunks(tmp_path: Path) -> None:
    """The lease would wait too long for all of them."""
    windows = ELSEWHERE_MAX + 1
    many = windowed(windows)
    with two_daemons(tmp_path) as (owner, here), owner.connect(many) as there, here.connect(many) as pool:
        keys = prompt(pool, 6, windows)
        store(there, keys, [windows])
        wait_until(lambda: int(here.stats()["peer.known_chunks"]) == 2 * windows, "they are known")
        assert pool.lookup(keys).chunks == 0
        store(pool, keys, [1], chunks=1)
        assert pool.lookup(keys).chunks == windows, "one of them is here now"
        assert_served(pool, keys, windows)


@SOME
def test_what_is_dropped_on_its_node_after_the_lookup_is_no_wrong_byte(pair: Pair, case: Case) -> None:
    with ranks_of(pair, case, "dropped") as (there, ranks):
        pool, keys = ranks.first, there.prompt(4, CHUNKS)
        there.store(keys)
        wait_known(pool, keys)
        hit = pool.lookup(keys)
        flush(pair[0], "dropped")
        with pool.acquire(hit) as lease:
            assert load(pool, lease)[0].chunks in (0, lease.chunks)
        wait_known(pool, keys, 0)
        ranks.store(keys)
        ranks.assert_served(keys, CHUNKS)


@pytest.mark.parametrize("steps", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_random_prompts_over_two_nodes_have_right_bytes(tmp_path: Path, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    with two_daemons(tmp_path) as nodes, ranks_of(nodes, CASES["hybrid"]) as both:
        connected = [one.first for one in both]
        chains = [prompt(connected[0], 10 + number, 12) for number in range(3)]
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


LEASES, LONG, WINDOW_CHUNKS = 16, 24, 18
# Of a load, and of an answer of the other node: what is tested is whether leases are granted, on a busy machine too.
TIMEOUT_S = 20.0


def windowed(chunks: int) -> kv.Layout:
    """A full group, and one with a window of so many chunks."""
    full = kv.Group(layers=2, kv_heads=2, head_dim=16, dtype="float16")
    window = kv.Group(kind="window", window=chunks * CHUNK, layers=3, kv_heads=1, head_dim=16, dtype="float16")
    return kv.Layout(chunk_tokens=CHUNK, groups=(full, window))


class Burst:
    """Leases and loads of one node's engines, all of which begin at once; bytes that are loaded are right, or it fails."""

    def __init__(self, pools: list[kv.Pool]) -> None:
        self.pools = pools
        self.chains = [prompt(pools[0], number, LONG) for number in range(LEASES)]

    def wait_known(self) -> None:
        for keys in self.chains:
            wait_known(self.pools[0], keys, LONG)

    def load_all(self) -> list[int]:
        """The chunks that each lease has brought."""
        start, loaded = threading.Barrier(len(self.chains)), [-1] * len(self.chains)

        def load_one(number: int) -> None:
            pool, keys = self.pools[number % len(self.pools)], self.chains[number]
            hit = pool.lookup(keys)
            start.wait()
            with pool.acquire(hit) as lease:
                if lease.chunks and (result := load(pool, lease)[0]).reason != "complete":
                    loaded[number] = result.chunks
                    return
                assert_loads(pool, keys, lease)
                loaded[number] = lease.chunks

        threads = [threading.Thread(target=load_one, args=(number,)) for number in range(len(self.chains))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert -1 not in loaded, "a lease has ended with an error"
        return loaded


@contextmanager
def burst(here: Daemon, connections: int) -> Iterator[Burst]:
    with ExitStack() as stack:
        layout = windowed(WINDOW_CHUNKS)
        yield Burst([stack.enter_context(here.connect(layout, timeout_s=TIMEOUT_S)) for _ in range(connections)])


@pytest.mark.timed
@pytest.mark.parametrize("connections", [1, LEASES])
@pytest.mark.parametrize("shm", ["false", "true"])
def test_all_of_many_leases_at_once_are_served(connections: int, shm: str, tmp_path: Path) -> None:
    """Over the stream, and out of the owner's memory: each is one pull of each group."""
    options = {f"{node}__peer__shm": shm for node in ("owner", "here")}
    options |= {f"here__peer__{bound}_timeout": f"{TIMEOUT_S:g}s" for bound in ("answer", "stall")}
    with (
        two_daemons(tmp_path, **options) as (owner, here),
        owner.connect(windowed(WINDOW_CHUNKS)) as there,
        burst(here, connections) as reader,
    ):
        for keys in reader.chains:
            store(there, keys, [LONG])
        reader.wait_known()
        assert reader.load_all() == [LONG] * LEASES
        assert owner.stats()["peer.asked.pulls"] == 2 * LEASES, "one of each group"
        assert here.stats()["peer.pulled_chunks"] == (LONG + WINDOW_CHUNKS) * LEASES
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's leases have ended")


def test_a_burst_at_a_node_that_has_ended_leaves_what_is_here(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path) as (owner, here),
        owner.connect(windowed(WINDOW_CHUNKS)) as there,
        burst(here, LEASES) as reader,
    ):
        for keys in reader.chains:
            store(reader.pools[0], keys, [4], chunks=4)
            store(there, keys, [LONG])
        reader.wait_known()
        owner.kill()
        assert set(reader.load_all()) <= {0, 4}
        wait_until(lambda: reader.load_all() == [4] * LEASES, "each has what is here")
        wait_until(lambda: here.stats()["peer.pulls_under_way"] == 0, "no pull is left")
