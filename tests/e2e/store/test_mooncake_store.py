"""Daemons on a real Mooncake Store: what one has published is a hit on another that never met it; what fails is a miss."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiers.store.objects import ObjectForm
from kvpool.types import Level, NamespaceId, SizeClassId
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, store, tokens_of
from tests.rigs.store.mooncake import HOST, Master, Segment, mooncake, needs_mooncake

pytestmark = needs_mooncake
CHUNKS = 40


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[Master, Segment]]:
    with mooncake(tmp_path) as both:
        yield both


def children_of(pid: int, word: str) -> list[int]:
    """The processes that a process has started with this word in their command."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(one) for path in children for one in path.read_text().split()}
    return [one for one in found if word in Path(f"/proc/{one}/cmdline").read_text()]


def node(directory: Path, name: str, master: Master, **options: str) -> Daemon:
    (directory / name).mkdir()
    given = {"store.master": master.address, "store.host": HOST, "store.buffer": "4MiB", "store.publish": "all"}
    return Daemon(directory / name, **{**given, "store.answer_timeout": "2s", **options})


def joined(*daemons: Daemon) -> None:
    for daemon in daemons:
        wait_until(lambda daemon=daemon: daemon.stats()["store.state"] == "ok", "the store is joined")  # type: ignore[misc]


def published(daemon: Daemon, chunks: int) -> None:
    wait_until(lambda: daemon.stats()["store.published_chunks"] >= chunks, "the chunks are published")


def load(pool: kv.Pool, keys: kv.KeyChain) -> kv.LoadResult:
    """Load what there is of a chain, and compare its bytes."""
    into = np.zeros((len(keys), SMALL.chunk_bytes), np.uint8)
    lease = pool.acquire(pool.lookup(keys))
    result = pool.load(lease, into=into[: lease.chunks]).wait()
    lease.release()
    assert_right_bytes(keys, SMALL, result, into)
    return result


def test_what_one_node_has_saved_is_a_hit_on_a_node_that_never_met_it(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    master, _ = shared
    with node(tmp_path, "a", master) as first, first.connect() as pool:
        joined(first)
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        published(first, CHUNKS)
    with node(tmp_path, "b", master) as second, second.connect() as pool:
        joined(second)
        assert set(pool.lookup(keys).tiers) == {Level.STORE}
        result = load(pool, keys)
        assert (result.chunks, result.reason) == (CHUNKS, "complete")
        wait_until(lambda: set(pool.lookup(keys).tiers) == {Level.DRAM}, "the chunks have landed")
        assert second.stats()["store.pulled_chunks"] == CHUNKS
        assert second.problems() == []


def chain_of(pool: kv.Pool, seed: int) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens))


def test_nodes_that_contribute_memory_need_no_other_client(tmp_path: Path) -> None:
    master = Master(tmp_path)
    master.start()
    try:
        segment = {"store.segment": "16MiB"}
        with node(tmp_path, "a", master, **segment) as first, node(tmp_path, "b", master, **segment) as second:
            joined(first, second)
            with first.connect() as pool, second.connect() as other:
                keys = chain_of(pool, 1)
                store(pool, keys)
                published(first, CHUNKS)
                assert load(other, keys).chunks == CHUNKS
    finally:
        master.kill()


def test_reused_chunks_of_the_disk_are_published(tmp_path: Path, shared: tuple[Master, Segment]) -> None:
    disk = {"ssd.path": str(tmp_path / "disk"), "ssd.capacity": "64MiB", "ssd.write_through": "true"}
    with node(tmp_path, "a", shared[0], **{**disk, "store.publish": "reused"}) as first, first.connect() as pool:
        joined(first)
        wait_until(lambda: first.stats()["ssd.state"] == "ok", "the tier is open")
        keys = chain_of(pool, 1)
        store(pool, keys)
        wait_until(lambda: first.stats()["ssd.demoted_chunks"] == CHUNKS, "the chunks are on disk")
        assert first.stats()["store.published_chunks"] == 0
        assert load(pool, keys).chunks == CHUNKS
        published(first, CHUNKS)


def test_a_killed_master_stops_nothing_and_its_next_life_is_used(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    master, _ = shared
    with node(tmp_path, "a", master) as first, node(tmp_path, "b", master) as second:
        joined(first, second)
        with first.connect() as pool, second.connect() as other:
            keys, further = chain_of(pool, 1), chain_of(pool, 2)
            store(pool, keys)
            published(first, CHUNKS)
            master.kill()
            assert load(other, keys).chunks == 0
            assert store(other, keys).stored == CHUNKS
            assert load(other, keys).chunks == CHUNKS
            assert store(pool, further).stored == CHUNKS
            master.start()

            def is_published() -> bool:
                load(pool, further)
                return bool(first.stats()["store.published_chunks"] > CHUNKS)

            wait_until(is_published, "the store is used again", 60.0)
            assert first.problems() == second.problems() == []


def test_chunks_of_a_killed_segment_are_a_miss_though_the_master_has_them(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    master, segment = shared
    with node(tmp_path, "a", master) as first, first.connect() as pool:
        joined(first)
        keys = chain_of(pool, 1)
        store(pool, keys)
        published(first, CHUNKS)
    with node(tmp_path, "b", master) as second, second.connect() as pool:
        joined(second)
        segment.kill()
        assert pool.lookup(keys).chunks == CHUNKS, "the master believes the segment to be alive"
        assert load(pool, keys).chunks == 0
        assert store(pool, keys).stored == CHUNKS
        assert second.problems() == []


def test_wrong_bytes_that_another_client_put_under_our_names_are_a_miss(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    master, segment = shared
    with node(tmp_path, "a", master) as first, first.connect() as pool:
        joined(first)
        keys = chain_of(pool, 1)
        namespace = Namespace(NamespaceId(0), SizeClassId(0), pool.model, SMALL)
        form = ObjectForm(namespace)
        names = [form.name_of(key) for key in KeyColumn(keys.columns()[0])]
        assert segment.put(names[3], bytes(form.object_bytes)) == 0
        assert segment.put(names[4], b"short") == 0
        store(pool, keys)
        published(first, CHUNKS)
        assert all(segment.exist(name) for name in names)
    with node(tmp_path, "b", master) as second, second.connect() as pool:
        joined(second)
        assert pool.lookup(keys).chunks == CHUNKS
        assert load(pool, keys).chunks == 3
        assert second.stats()["store.wrong_objects"] >= 1
        assert pool.lookup(keys).chunks == 3, "it is remembered"


def test_a_full_store_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    full = mooncake(tmp_path, segment_bytes=16 << 20, eviction_high_watermark_ratio="1.0")
    with full as (master, _), node(tmp_path, "a", master) as first, first.connect() as pool:
        joined(first)
        seed = 0
        while not first.stats()["store.unpublished_full"]:
            seed += 1
            assert seed < 400, "the store takes everything"
            store(pool, chain_of(pool, seed))
        assert load(pool, chain_of(pool, seed)).chunks == CHUNKS
        assert first.problems() == []


def test_an_end_of_the_store_process_is_survived(tmp_path: Path, shared: tuple[Master, Segment]) -> None:
    with node(tmp_path, "a", shared[0]) as first, first.connect() as pool:
        joined(first)
        keys = chain_of(pool, 1)
        store(pool, keys)
        published(first, CHUNKS)
        assert first.process is not None
        (child,) = children_of(first.process.pid, "kvpool.tiers.store.child")
        os.kill(child, signal.SIGABRT)
        wait_until(lambda: first.stats()["store.process_starts"] == 2, "it was started again")
        assert load(pool, keys).chunks == CHUNKS
        assert first.problems() == []
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "no process is left")
