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
from kvpool.states import Level
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW, WINDOW_CHUNKS
from tests.rigs.nodes.two_daemons import options_of
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import assert_hit_served, assert_loads, assert_served, key_of, load, prompt, store
from tests.rigs.runs.ports import free_port
from tests.rigs.store.scripted_store import SharedDirectory
from tests.rigs.store.store_daemon import StoreDaemon

CHUNKS = 10
# Of a load, which waits for the store.
TIMEOUT_S = 30.0

Published = tuple[StoreDaemon, kv.Pool]


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path)


@contextmanager
def node(shared: SharedDirectory, name: str = "here", **options: str) -> Iterator[tuple[StoreDaemon, kv.Pool]]:
    with (
        StoreDaemon(shared.path / name, shared, **options) as daemon,
        daemon.connect(HYBRID, timeout_s=TIMEOUT_S) as pool,
    ):
        yield daemon, pool
        assert daemon.problems() == []


class Nodes:
    """A store of this module's, a node that has published prompts there, and one that never met them.

    Each test has a prompt of its own; what the store does is that of all.
    """

    def __init__(self, shared: SharedDirectory, there: Published, here: StoreDaemon, pool: kv.Pool) -> None:
        self.shared, self.here, self.pool = shared, here, pool
        self.there, self.other = there
        self._prompts = 0
        self._before: dict[str, int] = {}

    def prompt(self) -> kv.KeyChain:
        """One that nobody has, to be asked of the node that has met no prompt of the store."""
        self.shared.play()
        self._prompts += 1
        wait_until(lambda: self.here.stats()["store.state"] == "ok", "the store is in use")
        self._before = self.here.stats()
        return prompt(self.pool, self._prompts, CHUNKS)

    def published(self, *boundaries: int) -> kv.KeyChain:
        """One that the other node has published with these boundaries."""
        keys = self.prompt()
        before = int(self.there.stats()["store.published_chunks"])
        stored = store(self.other, keys, boundaries).stored
        for boundary in boundaries:
            self.use_there(keys, boundary)
        self.there.wait_published(before + stored)
        return keys

    def use_there(self, keys: kv.KeyChain, boundary: int) -> None:
        """Lease so many chunks of the node that publishes: what is used again is published."""
        with self.other.acquire(self.other.lookup(keys, chunks_max=boundary)) as lease:
            assert lease.chunks == boundary

    def counted(self, name: str) -> int:
        """How much a statistic of the node has grown since the prompt was made."""
        return int(self.here.stats()[name]) - int(self._before[name])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    shared = SharedDirectory(tmp_path_factory.mktemp("store"))
    with node(shared, "there", **{"store.publish": "reused"}) as there, node(shared) as (here, pool):
        yield Nodes(shared, there, here, pool)


def publish(shared: SharedDirectory, *boundaries: int) -> None:
    """Have another node publish the prompt with these boundaries."""
    with node(shared, "there", **{"store.publish": "all"}) as (daemon, pool):
        result = store(pool, prompt(pool, 1, CHUNKS), boundaries)
        daemon.wait_published(result.stored)


def object_of(shared: SharedDirectory, keys: kv.KeyChain, group: int, chunk: int) -> Path:
    return shared.objects()[key_of(keys, group, chunk).hex()]


def test_what_one_node_has_published_is_a_hit_on_a_node_that_never_met_it(nodes: Nodes) -> None:
    before = set(nodes.shared.objects())
    keys, pool = nodes.published(CHUNKS), nodes.pool
    assert len(set(nodes.shared.objects()) - before) == CHUNKS + WINDOW_CHUNKS + 1
    hit = pool.lookup(keys)
    assert (hit.chunks, hit.chunks_here) == (CHUNKS, 0)
    assert set(hit.tiers.tolist()) == {Level.STORE}
    assert_served(pool, keys, CHUNKS)
    wait_until(lambda: set(pool.lookup(keys).tiers.tolist()) == {Level.DRAM}, "the chunks have landed")
    assert nodes.counted("store.pulled_chunks") == CHUNKS + WINDOW_CHUNKS + 1


@pytest.mark.parametrize("boundary", [4, CHUNKS])
def test_a_hit_goes_on_over_what_is_here_and_the_store(nodes: Nodes, boundary: int) -> None:
    keys = nodes.published(4, CHUNKS)
    store(nodes.pool, keys, [boundary], chunks=boundary)
    assert_served(nodes.pool, keys, CHUNKS)
    if boundary == CHUNKS:
        assert nodes.counted("store.queries") == 0, "all of it is here"


def test_windows_of_the_store_serve_full_chunks_that_are_here(nodes: Nodes) -> None:
    keys = nodes.published(CHUNKS)
    store(nodes.pool, keys, [4])
    assert nodes.pool.lookup(keys, chunks_max=4).chunks == 4
    assert_served(nodes.pool, keys, CHUNKS)
    assert nodes.counted("store.pulled_chunks") == WINDOW_CHUNKS + 1


@pytest.mark.parametrize(("group", "chunk"), [(FULL, 8), (WINDOW, 8), (STATE, 9)])
def test_what_is_there_in_part_is_the_hit_of_the_boundary_before(nodes: Nodes, group: int, chunk: int) -> None:
    keys = nodes.published(4, CHUNKS)
    object_of(nodes.shared, keys, group, chunk).unlink()
    hit = nodes.pool.lookup(keys)
    assert (hit.chunks, hit.full_chunks) == (4, 8 if group == FULL else CHUNKS)
    assert_served(nodes.pool, keys, 4)


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
        pytest.param(WINDOW, _other_group, "gone_objects", marks=pytest.mark.slow),
        pytest.param(STATE, _shorten, "gone_objects", marks=pytest.mark.slow),
    ],
)
def test_wrong_bytes_in_the_store_are_refused_and_the_boundary_before_serves(
    nodes: Nodes, group: int, spoil: Callable[[Path], None], count: str
) -> None:
    keys, pool = nodes.published(4, CHUNKS), nodes.pool
    spoil(object_of(nodes.shared, keys, group, 9))
    with pool.acquire(pool.lookup(keys)) as lease:
        if lease:
            assert load(pool, lease)[0].chunks in (0, 4)
    wait_until(lambda: nodes.counted(f"store.{count}") > 0, "the object is refused")
    wait_until(lambda: _is_served(pool, keys), "the boundary before it serves")


@pytest.mark.slow
def test_a_chunk_that_leaves_the_store_after_the_lookup_is_no_wrong_byte(shared: SharedDirectory) -> None:
    publish(shared, 4, CHUNKS)
    with node(shared) as (_, pool):
        keys = prompt(pool, 1, CHUNKS)
        hit = pool.lookup(keys)
        assert hit.chunks == CHUNKS
        object_of(shared, keys, STATE, 9).unlink()
        with pool.acquire(hit) as lease:
            result = load(pool, lease)[0]
        assert result.chunks in (0, 4)
        wait_until(lambda: _is_served(pool, keys), "the boundary before it serves")


def _is_served(pool: kv.Pool, keys: kv.KeyChain) -> bool:
    """Whether a lookup finds four chunks, which are then right. An object that cannot be read is known for `store.miss_ttl`:
    a lookup after that time promises it again, and no load brings it."""
    with pool.acquire(pool.lookup(keys)) as lease:
        assert not lease or load(pool, lease)[0].chunks in (0, 4)
    hit = pool.lookup(keys)
    if hit.chunks != 4:
        return False
    assert_hit_served(pool, keys, hit)
    return True


def test_a_client_with_less_time_than_the_store_has_suspends_it_for_nobody(nodes: Nodes) -> None:
    keys = nodes.published(CHUNKS)
    with nodes.here.connect(HYBRID) as hasty:
        session = hasty._link.session
        assert session is not None
        counts = np.ones(len(HYBRID.parts), "<u4").tobytes()
        for number in range(8):
            asked = hasty.keys(tokens_of(100 + number, CHUNK))
            session.call(sk.Seek(counts, b"".join(asked.columns()), 1e-9), sk.Sought)
        assert (nodes.here.stats()["store.state"], nodes.counted("store.late_answers")) == ("ok", 0)
        assert nodes.pool.lookup(keys).chunks == CHUNKS


@pytest.mark.slow
def test_a_node_killed_while_it_fetches_leaves_nothing_wrong(shared: SharedDirectory) -> None:
    publish(shared, CHUNKS)
    with node(shared) as (daemon, pool):
        keys = prompt(pool, 1, CHUNKS)
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
    with node(shared, **{"store.buffer": "1MiB"}) as (daemon, _), daemon.connect(large, timeout_s=TIMEOUT_S) as pool:
        hit = pool.lookup(prompt(pool, 1, CHUNKS))
        assert (hit.chunks, hit.full_chunks) == (0, CHUNKS)


def test_reused_chunks_of_groups_are_published_after_their_lease_and_no_others(nodes: Nodes) -> None:
    keys, before = nodes.prompt(), set(nodes.shared.objects())
    published = int(nodes.there.stats()["store.published_chunks"])
    store(nodes.other, keys, [4, CHUNKS])
    nodes.use_there(keys, 4)
    nodes.there.wait_published(published + 4 + WINDOW_CHUNKS + 1)
    named = {key_of(keys, FULL, chunk).hex() for chunk in range(4)}
    named |= {key_of(keys, group, chunk).hex() for group, chunk in ((WINDOW, 2), (WINDOW, 3), (STATE, 3))}
    assert set(nodes.shared.objects()) - before == named


def test_a_hit_is_joined_from_another_node_and_the_store(nodes: Nodes, tmp_path: Path) -> None:
    """The other node has full chunks, the store windows and states."""
    keys = nodes.published(CHUNKS)
    for chunk in range(CHUNKS):
        object_of(nodes.shared, keys, FULL, chunk).unlink()
    ports = free_port(), free_port()
    with (
        Daemon(tmp_path, **options_of("owner", *ports)) as owner,
        owner.connect(HYBRID) as other,
        node(nodes.shared, "joining", **options_of("here", *reversed(ports))) as (daemon, pool),
    ):
        store(other, keys, [4])
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the other node's chunks are known")
        assert set(pool.lookup(keys).tiers.tolist()) == {Level.PEER, Level.STORE}
        assert_served(pool, keys, CHUNKS)
        assert daemon.stats()["peer.pulled_chunks"] == CHUNKS
        assert daemon.stats()["store.pulled_chunks"] == WINDOW_CHUNKS + 1


def test_a_prompt_that_is_here_is_not_asked_of_the_store(nodes: Nodes) -> None:
    keys = nodes.prompt()
    store(nodes.pool, keys)
    for _ in range(3):
        assert_served(nodes.pool, keys, CHUNKS)
    assert nodes.counted("store.queries") == 0


@pytest.mark.slow
def test_random_prompts_over_two_nodes_and_a_spoiled_store_have_right_bytes(shared: SharedDirectory, seed: int) -> None:
    chance = random.Random(seed)
    options = {"store.publish": "all"}
    with node(shared, "a", **options) as (one, first), node(shared, "b", **options) as (other, second):
        chains = [prompt(first, 10 + number, CHUNKS) for number in range(5)]
        loaded = 0
        for _ in range(60):
            pool, keys, act = chance.choice((first, second)), chance.choice(chains), chance.random()
            if act < 0.5:
                with pool.acquire(pool.lookup(keys)) as lease:
                    if lease and load(pool, lease)[0].reason == "complete":
                        loaded += 1
                        assert_loads(pool, keys, lease)
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
