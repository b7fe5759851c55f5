"""Native loads and saves between numpy arrays and a real arena with its directory, against a model of the stored bytes."""

import gc
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvpool_native
from tests.rigs.native_copies import (
    BLOCKS,
    CHUNK_BYTES,
    COMPLETE,
    EXTENT_BYTES,
    EXTENTS,
    LONG_S,
    Engine,
    Store,
    column,
    save,
    some_ids,
    start_load,
)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[kvpool_native.CopyPool]:
    made = kvpool_native.CopyPool(request.param)
    yield made
    made.stop()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.mark.parametrize("form", ["kv_first", "block_first", "packed"])
def test_a_saved_chunk_is_layer_major_and_checksummed(pool: kvpool_native.CopyPool, store: Store, form: str) -> None:
    engine = Engine(form, 16)
    ids = some_ids(20)
    offsets = save(pool, store, engine, ids)
    for offset, expected in zip(np.frombuffer(offsets, np.uint64), engine.chunks(ids), strict=True):
        assert store.bytes[int(offset) : int(offset) + CHUNK_BYTES].tobytes() == expected
        sums = [kvpool_native.crc32c(part) for part in np.frombuffer(expected, np.uint8).reshape(EXTENTS, EXTENT_BYTES)]
        assert (
            kvpool_native.extent_checksums(store.arena, int(offset), EXTENT_BYTES, EXTENTS)
            == np.array(sums, np.uint32).tobytes()
        )


@pytest.mark.parametrize("source", ["kv_first", "block_first"])
@pytest.mark.parametrize("target", ["kv_first", "block_first"])
def test_engines_with_other_forms_and_block_sizes_share_chunks(
    pool: kvpool_native.CopyPool, store: Store, source: str, target: str
) -> None:
    writer, reader = Engine(source, 16), Engine(target, 32, fill=0)
    saved, loaded = some_ids(20), some_ids(10, seed=2)
    offsets = save(pool, store, writer, saved)
    job = start_load(pool, store, reader, loaded, offsets)
    assert [job.wait_extent(extent, LONG_S) for extent in range(EXTENTS)] == [1] * EXTENTS
    assert job.wait(LONG_S)
    assert (job.chunks(), job.reason(), job.done()) == (5, COMPLETE, True)
    assert reader.chunks(loaded) == writer.chunks(saved)
    assert job.progress() == 5 * EXTENTS


def refused(pool: kvpool_native.CopyPool, store: Store, engine: Engine, **wrong: Any) -> None:
    ids = some_ids(8)
    offsets = store.reserve(2)
    store.commit(bytes(2 * EXTENTS * 4))
    arguments: dict[str, Any] = {
        "view": engine.view,
        "arena": store.arena,
        "offsets": offsets,
        "block_ids": column(ids),
        "extents": EXTENTS,
        "payload_bytes": EXTENT_BYTES,
    }
    for_load = {"index": store.index, "slots": store.slots, "generations": store.generations, "verifies": True}
    if wrong.get("block_ids") != column([-1] * 8):
        with pytest.raises(ValueError, match=r"."):
            pool.load(**{**arguments, **for_load, **wrong})
    wrong.pop("generations", None)
    wrong.pop("slots", None)
    if wrong:
        with pytest.raises(ValueError, match=r"."):
            pool.save(**{**arguments, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": column([0, 2**62])},
        {"offsets": column([0, -1])},
        {"offsets": bytes(15)},
        {"offsets": column([0])},
        {"block_ids": column([0] * 7 + [BLOCKS])},
        {"block_ids": column([0] * 7 + [-2])},
        {"block_ids": column([-1] * 8)},
        {"block_ids": column([0] * 7)},
        {"block_ids": bytes(63)},
        {"generations": bytes(8)},
        {"slots": bytes(8)},
        {"slots": column([0, 1 << 32])},
        {"slots": column([0, 1 << 31])},
        {"extents": EXTENTS + 1},
        {"extents": 0},
        {"payload_bytes": EXTENT_BYTES // 2},
        {"payload_bytes": 0},
        {"payload_bytes": 2**63},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_addresses_outside_are_refused_before_any_copy(
    pool: kvpool_native.CopyPool, store: Store, wrong: dict[str, object]
) -> None:
    engine = Engine("kv_first", 16, fill=3)
    before = store.bytes[: 8 * CHUNK_BYTES].copy()
    refused(pool, store, engine, **wrong)
    assert pool.bytes_copied() == 0
    assert all((array == 3).all() for array in engine.arrays)
    assert (store.bytes[: 8 * CHUNK_BYTES] == before).all()


def test_an_extent_ends_inside_the_arena(pool: kvpool_native.CopyPool, store: Store) -> None:
    engine = Engine("kv_first", 16)
    last, ids = store.arena.size - CHUNK_BYTES, column(some_ids(4))
    pool.save(engine.view, store.arena, column([last]), ids, EXTENTS, EXTENT_BYTES)
    with pytest.raises(ValueError, match="arena"):
        pool.save(engine.view, store.arena, column([last + 1]), ids, EXTENTS, EXTENT_BYTES)


def test_a_missing_extent_is_refused(pool: kvpool_native.CopyPool, store: Store) -> None:
    engine = Engine("kv_first", 16)
    ids = some_ids(4)
    offsets = save(pool, store, engine, ids)
    with pytest.raises(ValueError, match="extent"):
        start_load(pool, store, engine, ids, offsets).wait_extent(EXTENTS, 0.0)
    with pytest.raises(ValueError, match="extent"):
        pool.save(engine.view, store.arena, offsets, column(ids), EXTENTS, EXTENT_BYTES).announce(EXTENTS)


def test_nothing_is_saved_through_a_read_only_mapping(pool: kvpool_native.CopyPool, store: Store) -> None:
    reader = kvpool_native.Mapping.attach(store.arena.fd, store.arena.size, False)
    with pytest.raises(ValueError, match="read-only"):
        pool.save(Engine("kv_first", 16).view, reader, store.reserve(1), column(some_ids(4)), EXTENTS, EXTENT_BYTES)


def test_a_job_keeps_the_engines_arrays_and_ends_with_its_handle(store: Store) -> None:
    pool = kvpool_native.CopyPool(1)
    engine = Engine("kv_first", 16)
    ids = some_ids(40)
    offsets = save(pool, store, engine, ids)
    target = Engine("kv_first", 16, fill=0)
    array = weakref.ref(target.arrays[0])
    job = start_load(pool, store, target, ids, offsets)
    del target
    gc.collect()
    assert array() is not None
    del job
    gc.collect()
    assert array() is None
    pool.stop()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_job_holds_no_python_object_that_its_threads_would_have_to_drop(
    pool: kvpool_native.CopyPool, store: Store
) -> None:
    engine = Engine("kv_first", 16)
    ids = some_ids(4)
    offsets = save(pool, store, engine, ids)
    before = sys.getrefcount(store.arena), sys.getrefcount(store.index)
    job = start_load(pool, store, engine, ids, offsets)
    assert (sys.getrefcount(store.arena), sys.getrefcount(store.index)) == before
    assert job.wait(LONG_S)


def test_a_forked_child_can_drop_what_it_inherited(store: Store) -> None:
    pool = kvpool_native.CopyPool(2)
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0)
    ids = some_ids(40)
    offsets = save(pool, store, writer, ids)
    jobs = [start_load(pool, store, reader, ids, offsets) for _ in range(50)]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        del jobs, pool
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(job.wait(LONG_S) and job.chunks() == 10 for job in jobs)
    pool.stop()
