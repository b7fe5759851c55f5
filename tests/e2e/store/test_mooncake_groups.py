"""Chunks of groups in a real Mooncake Store: a hit on a node that never met the one which saved them, and shorter ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.index.namespaces import Namespace
from kvpool.tiers.store.objects import ObjectForm
from kvpool.types import Level, NamespaceId, SizeClassId
from tests.e2e.store.test_mooncake_store import joined, node, published
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CHUNK, HYBRID, STATE, WINDOW_CHUNKS
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import assert_served, key_of, load, store
from tests.rigs.store.mooncake import Master, Segment, mooncake, needs_mooncake

pytestmark = needs_mooncake
CHUNKS = 40


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[Master, Segment]]:
    with mooncake(tmp_path) as both:
        yield both


@contextmanager
def served(directory: Path, name: str, master: Master, **options: str) -> Iterator[tuple[Daemon, kv.Pool, kv.KeyChain]]:
    with node(directory, name, master, **options) as daemon, daemon.connect(HYBRID, timeout_s=5.0) as pool:
        joined(daemon)
        yield daemon, pool, pool.keys(tokens_of(1, CHUNKS * CHUNK + 1))
        assert daemon.problems() == []


def test_a_prompt_of_groups_is_a_hit_on_a_node_that_never_met_its_owner(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    with served(tmp_path, "a", shared[0]) as (first, pool, keys):
        published(first, store(pool, keys, [4, CHUNKS]).stored)
    with served(tmp_path, "b", shared[0]) as (second, pool, keys):
        assert set(pool.lookup(keys).tiers.tolist()) == {Level.STORE}
        assert_served(pool, keys, CHUNKS)
        assert second.stats()["store.pulled_chunks"] == CHUNKS + WINDOW_CHUNKS + 1
        wait_until(lambda: set(pool.lookup(keys).tiers.tolist()) == {Level.DRAM}, "the chunks have landed")
        assert pool.lookup(keys, chunks_max=CHUNKS - 1).chunks == 4
        assert_served(pool, keys, CHUNKS)


def test_wrong_bytes_under_a_states_name_leave_the_boundary_before(
    tmp_path: Path, shared: tuple[Master, Segment]
) -> None:
    master, segment = shared
    with served(tmp_path, "a", master) as (first, pool, keys):
        part = HYBRID.of_group(STATE)
        form = ObjectForm(Namespace(NamespaceId(0), SizeClassId(0), pool.model, part))
        assert segment.put(form.name_of(key_of(keys, STATE, CHUNKS - 1)), bytes(form.object_bytes)) == 0
        published(first, store(pool, keys, [4, CHUNKS]).stored)
    with served(tmp_path, "b", master) as (second, pool, keys):
        with pool.acquire(pool.lookup(keys)) as lease:
            assert load(pool, lease)[0].chunks in (0, 4)
        wait_until(lambda: second.stats()["store.wrong_objects"] == 1, "the object is refused")
        assert_served(pool, keys, 4)


def test_chunks_of_a_killed_segment_are_a_miss(tmp_path: Path, shared: tuple[Master, Segment]) -> None:
    master, segment = shared
    with served(tmp_path, "a", master) as (first, pool, keys):
        published(first, store(pool, keys).stored)
    with served(tmp_path, "b", master) as (_, pool, keys):
        segment.kill()
        with pool.acquire(pool.lookup(keys)) as lease:
            assert load(pool, lease)[0].chunks == 0
        assert store(pool, keys).declined == 0
        assert_served(pool, keys, CHUNKS)
