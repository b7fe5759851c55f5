"""Daemons on a real Mooncake Store: what one has published is a hit on another that never met it; what fails is a miss."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.ids import NamespaceId, SizeClassId
from kvpool.index.namespaces import Namespace
from kvpool.states import Level
from kvpool.tiers.store.objects import ObjectForm
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.layouts import CASES, HYBRID
from tests.rigs.prompts import assert_loads, assert_served, key_of, load, prompt, store
from tests.rigs.store.mooncake import HOST, Master, Segment, mooncake, needs_mooncake

pytestmark = needs_mooncake
CHUNKS = 40
LAYOUTS = pytest.mark.parametrize("layout", [SMALL, HYBRID], ids=["plain", "hybrid"])
Shared = tuple[Master, Segment]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    with mooncake(tmp_path) as both:
        yield both


def children_of(pid: int, word: str) -> list[int]:
    """The processes that a process has started with this word in their command."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(one) for path in children for one in path.read_text().split()}
    return [one for one in found if word in Path(f"/proc/{one}/cmdline").read_text()]


@contextmanager
def node(
    directory: Path, name: str, master: Master, layout: kv.Layout = SMALL, *, options: dict[str, str] | None = None
) -> Iterator[tuple[Daemon, kv.Pool]]:
    """A node that has joined the store, and a Pool on it."""
    (directory / name).mkdir()
    given = {"store.master": master.address, "store.host": HOST, "store.buffer": "4MiB", "store.publish": "all"}
    given |= {"store.answer_timeout": "2s", **(options or {})}
    with Daemon(directory / name, **given) as daemon, daemon.connect(layout, timeout_s=5.0) as pool:
        wait_until(lambda: daemon.stats()["store.state"] == "ok", "the store is joined")
        yield daemon, pool
        assert daemon.problems() == []


def chain_of(pool: kv.Pool, seed: int = 1) -> kv.KeyChain:
    return prompt(pool, seed, CHUNKS)


def publish(daemon: Daemon, pool: kv.Pool, keys: kv.KeyChain, *, there: int = 0) -> int:
    """Save a prompt, with a boundary at 4 chunks: how many chunks of all groups are published then. `there`: of them in the
    store before, which are not sent."""
    before, result = int(daemon.stats()["store.published_chunks"]), store(pool, keys, [4, CHUNKS])
    assert result.declined == 0
    wanted = before + result.stored - there
    wait_until(lambda: daemon.stats()["store.published_chunks"] >= wanted, "the chunks are published")
    return result.stored


def loaded(pool: kv.Pool, keys: kv.KeyChain) -> int:
    """How many chunks of a prompt come, which are then right."""
    with pool.acquire(pool.lookup(keys)) as lease:
        result, _ = load(pool, lease)
        if result.reason == "complete":
            assert_loads(pool, keys, lease)
    return result.chunks


@LAYOUTS
def test_what_one_node_has_saved_is_a_hit_on_a_node_that_never_met_it(
    tmp_path: Path, shared: Shared, layout: kv.Layout
) -> None:
    with node(tmp_path, "a", shared[0], layout) as (first, pool):
        published = publish(first, pool, chain_of(pool))
    with node(tmp_path, "b", shared[0], layout) as (second, pool):
        keys = chain_of(pool)
        assert set(pool.lookup(keys).tiers.tolist()) == {Level.STORE}
        assert_served(pool, keys, CHUNKS)
        wait_until(lambda: set(pool.lookup(keys).tiers.tolist()) == {Level.DRAM}, "the chunks have landed")
        if layout is SMALL:
            assert second.stats()["store.pulled_chunks"] == published
        else:
            assert pool.lookup(keys, chunks_max=CHUNKS - 1).chunks == 4


def test_nodes_that_contribute_memory_need_no_other_client(tmp_path: Path) -> None:
    master = Master(tmp_path)
    master.start()
    try:
        segment = {"store.segment": "16MiB"}
        with (
            node(tmp_path, "a", master, options=segment) as (first, pool),
            node(tmp_path, "b", master, options=segment) as (_, other),
        ):
            publish(first, pool, chain_of(pool))
            assert_served(other, chain_of(pool), CHUNKS)
    finally:
        master.kill()


def test_reused_chunks_of_the_disk_are_published(tmp_path: Path, shared: Shared) -> None:
    disk = {"ssd.path": str(tmp_path / "disk"), "ssd.capacity": "64MiB", "ssd.write_through": "true"}
    with node(tmp_path, "a", shared[0], options={**disk, "store.publish": "reused"}) as (first, pool):
        wait_until(lambda: first.stats()["ssd.state"] == "ok", "the tier is open")
        keys = chain_of(pool)
        store(pool, keys)
        wait_until(lambda: first.stats()["ssd.demoted_chunks"] == CHUNKS, "the chunks are on disk")
        assert first.stats()["store.published_chunks"] == 0
        assert_served(pool, keys, CHUNKS)
        wait_until(lambda: first.stats()["store.published_chunks"] >= CHUNKS, "they are published")


def test_a_killed_master_stops_nothing_and_its_next_life_is_used(tmp_path: Path, shared: Shared) -> None:
    master, _ = shared
    with node(tmp_path, "a", master) as (first, pool), node(tmp_path, "b", master) as (_, other):
        keys, further = chain_of(pool), chain_of(pool, 2)
        publish(first, pool, keys)
        master.kill()
        assert loaded(other, keys) == 0
        assert store(other, keys).stored == CHUNKS
        assert_served(other, keys, CHUNKS)
        assert store(pool, further).stored == CHUNKS
        master.start()

        def is_published() -> bool:
            loaded(pool, further)
            return bool(first.stats()["store.published_chunks"] > CHUNKS)

        wait_until(is_published, "the store is used again", 60.0)


@LAYOUTS
def test_chunks_of_a_killed_segment_are_a_miss_though_the_master_has_them(
    tmp_path: Path, shared: Shared, layout: kv.Layout
) -> None:
    master, segment = shared
    with node(tmp_path, "a", master, layout) as (first, pool):
        publish(first, pool, chain_of(pool))
    with node(tmp_path, "b", master, layout) as (_, pool):
        segment.kill()
        keys = chain_of(pool)
        assert pool.lookup(keys).chunks == CHUNKS, "the master believes the segment to be alive"
        assert loaded(pool, keys) == 0
        assert store(pool, keys).declined == 0
        assert_served(pool, keys, CHUNKS)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_wrong_bytes_that_another_client_put_under_our_names_are_a_miss(
    tmp_path: Path, shared: Shared, name: str
) -> None:
    """Of a chunk, or of the last state: then the boundary before it serves."""
    master, segment = shared
    layout = CASES[name].layout
    group, chunk, good = (0, 3, 3) if name == "plain" else (len(layout.groups) - 1, CHUNKS - 1, 4)
    with node(tmp_path, "a", master, layout) as (first, pool):
        keys = chain_of(pool)
        form = ObjectForm(Namespace(NamespaceId(0), SizeClassId(0), pool.model, layout.group_layouts[group]))
        names = [form.name_of(key_of(keys, group, number)) for number in range(CHUNKS)]
        assert segment.put(names[chunk], bytes(form.object_bytes)) == 0
        if name == "plain":
            assert segment.put(names[chunk + 1], b"short") == 0
        publish(first, pool, keys, there=len(names[chunk : chunk + 2]))
        assert all(segment.exist(one) for one in names[chunk : chunk + 2])
    with node(tmp_path, "b", master, layout) as (second, pool):
        assert pool.lookup(keys).chunks == CHUNKS
        assert loaded(pool, keys) in (0, good)
        wait_until(lambda: second.stats()["store.wrong_objects"] >= 1, "the object is refused")
        assert_served(pool, keys, good)  # it is remembered


def test_a_full_store_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    full = mooncake(tmp_path, segment_bytes=16 << 20, eviction_high_watermark_ratio="1.0")
    with full as (master, _), node(tmp_path, "a", master) as (first, pool):
        seed = 0
        while not first.stats()["store.unpublished_full"]:
            seed += 1
            assert seed < 400, "the store takes everything"
            store(pool, chain_of(pool, seed))
        assert_served(pool, chain_of(pool, seed), CHUNKS)


def test_an_end_of_the_store_process_is_survived(tmp_path: Path, shared: Shared) -> None:
    with node(tmp_path, "a", shared[0]) as (first, pool):
        keys = chain_of(pool)
        publish(first, pool, keys)
        assert first.process is not None
        (child,) = children_of(first.process.pid, "kvpool.tiers.store.child")
        os.kill(child, signal.SIGABRT)
        wait_until(lambda: first.stats()["store.process_starts"] == 2, "it was started again")
        assert_served(pool, keys, CHUNKS)
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "no process is left")
