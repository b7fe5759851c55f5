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
    CANCELLED,
    CHECKSUM,
    CHUNK_BYTES,
    COMPLETE,
    EXTENT_BYTES,
    EXTENTS,
    GONE,
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


def test_a_packed_engine_loads_its_own_bytes(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer, reader = Engine("packed", 32), Engine("packed", 32, fill=0)
    ids = some_ids(8)
    job = start_load(pool, store, reader, ids, save(pool, store, writer, ids))
    assert job.wait(LONG_S)
    assert reader.chunks(ids) == writer.chunks(ids)


def test_blocks_that_no_id_names_stay_as_they_were(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0xAB)
    ids = some_ids(8)
    partly = [-1 if number in (1, 4, 5) else block for number, block in enumerate(ids)]
    job = start_load(pool, store, reader, partly, save(pool, store, writer, ids))
    assert job.wait(LONG_S)
    assert job.chunks() == 2
    for extent in range(EXTENTS):
        for block in range(BLOCKS):
            got = reader.arrays[extent][:, block]
            expected = writer.arrays[extent][:, block] if block in partly else np.full_like(got, 0xAB)
            assert (got == expected).all()


@pytest.mark.parametrize("skip", [False, True], ids=["loaded", "in a skipped block"])
def test_a_corrupt_byte_ends_the_load_before_its_chunk(pool: kvpool_native.CopyPool, store: Store, skip: bool) -> None:
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0)
    ids = some_ids(20)
    offsets = save(pool, store, writer, ids)
    bad = int(np.frombuffer(offsets, np.uint64)[3])
    store.bytes[bad + EXTENT_BYTES] ^= 1  # the first block's first byte in the second extent
    wanted = [-1 if skip and number == 12 else block for number, block in enumerate(ids)]
    job = start_load(pool, store, reader, wanted, offsets)
    assert job.wait(LONG_S)
    assert (job.chunks(), job.reason()) == (3, CHECKSUM)
    assert reader.chunks(ids)[:3] == writer.chunks(ids)[:3]
    unverified = start_load(pool, store, reader, ids, offsets, verifies=False)
    assert unverified.wait(LONG_S)
    assert (unverified.chunks(), unverified.reason()) == (5, COMPLETE)


def test_a_chunk_that_left_the_pool_is_a_miss_whatever_its_bytes(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0)
    ids = some_ids(20)
    offsets = save(pool, store, writer, ids)
    store.bytes[int(np.frombuffer(offsets, np.uint64)[2])] ^= 1
    store.drop(2)
    job = start_load(pool, store, reader, ids, offsets)
    assert job.wait(LONG_S)
    assert (job.chunks(), job.reason()) == (2, GONE)
    assert job.wait_extent(EXTENTS - 1, LONG_S) == 1
    store.drop(0)
    none = start_load(pool, store, reader, ids, offsets)
    assert none.wait(LONG_S)
    assert (none.chunks(), none.reason(), none.wait_extent(0, LONG_S)) == (0, GONE, 0)


def test_a_contiguous_array_is_one_block_for_each_chunk(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer = Engine("kv_first", 16)
    ids = some_ids(20)
    offsets = save(pool, store, writer, ids)
    into = np.zeros((5, CHUNK_BYTES), np.uint8)
    view = kvpool_native.CacheView(
        bases=[into.ctypes.data + extent * EXTENT_BYTES for extent in range(EXTENTS)],
        planes=1,
        blocks=5,
        plane_block_bytes=EXTENT_BYTES,
        plane_stride=0,
        block_stride=CHUNK_BYTES,
        owner=into,
    )
    job = pool.load(
        view,
        store.arena,
        store.index,
        offsets,
        store.slots,
        store.generations,
        column(range(5)),
        EXTENTS,
        EXTENT_BYTES,
        True,
    )
    assert job.wait(LONG_S)
    assert [row.tobytes() for row in into] == writer.chunks(ids)


def test_after_cancel_no_byte_is_written(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0)
    ids = some_ids(40)
    offsets = save(pool, store, writer, ids)
    for _ in range(20):
        job = start_load(pool, store, reader, ids, offsets)
        job.cancel()
        then = [array.copy() for array in reader.arrays]
        assert job.done()
        assert job.reason() in (COMPLETE, CANCELLED)
        assert (job.reason() == COMPLETE) == (job.chunks() == 10)
        later = start_load(pool, store, Engine("kv_first", 16, fill=0), ids, offsets)
        assert later.wait(LONG_S)
        assert all((a == b).all() for a, b in zip(then, reader.arrays, strict=True))


def test_a_save_copies_each_extent_once_and_when_announced(pool: kvpool_native.CopyPool, store: Store) -> None:
    engine = Engine("kv_first", 16)
    ids = some_ids(8)
    offsets = store.reserve(2)
    job = pool.save(engine.view, store.arena, offsets, column(ids), EXTENTS, EXTENT_BYTES)
    assert job.wait(0.0)
    assert job.progress() == 0
    assert job.announce(2)
    assert not job.announce(2)
    assert job.wait(LONG_S)
    assert job.progress() == 2
    assert job.checksums() == b""
    engine.arrays[2][:] = 0  # copied already, so no longer ours
    job.announce_all()
    assert job.wait(LONG_S)
    sums = np.frombuffer(job.checksums(), np.uint32).reshape(2, EXTENTS)
    assert all(sums[chunk, 2] != sums[chunk, 0] for chunk in range(2))
    store.commit(job.checksums())
    reader = Engine("kv_first", 16, fill=0)
    load = start_load(pool, store, reader, ids, offsets)
    assert load.wait(LONG_S)
    assert load.chunks() == 2


def test_a_stopped_pool_cancels_new_jobs(store: Store) -> None:
    pool = kvpool_native.CopyPool(1)
    engine = Engine("kv_first", 16)
    ids = some_ids(4)
    offsets = save(pool, store, engine, ids)
    waiting = pool.save(engine.view, store.arena, offsets, column(ids), EXTENTS, EXTENT_BYTES)
    pool.stop()
    pool.stop()
    load = start_load(pool, store, engine, ids, offsets)
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason(), load.wait_extent(0, LONG_S)) == (0, CANCELLED, 0)
    waiting.announce_all()
    assert waiting.wait(LONG_S)
    assert waiting.is_cancelled()
    assert waiting.checksums() == b""
    assert pool.bytes_copied() == CHUNK_BYTES
    assert pool.cpu_seconds() >= 0


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


def test_chunks_that_were_dropped_before_their_load_are_misses(pool: kvpool_native.CopyPool, store: Store) -> None:
    writer, reader = Engine("kv_first", 16), Engine("kv_first", 16, fill=0)
    ids = some_ids(12)
    offsets = save(pool, store, writer, ids)
    store.slots = column([*np.frombuffer(store.slots, np.int64)[:1], -1, 10**6])  # the second is in no slot any more
    with pytest.raises(ValueError, match="slot"):
        start_load(pool, store, reader, ids, offsets)
    store.slots = store.slots[:16] + store.slots[:8]  # the third's slot has another chunk now
    job = start_load(pool, store, reader, ids, offsets)
    assert job.wait(LONG_S)
    assert (job.chunks(), job.reason()) == (1, GONE)
    assert reader.chunks(ids)[0] == writer.chunks(ids)[0]


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


@pytest.mark.parametrize("threads", [0, 257])
def test_a_pool_has_1_to_256_threads(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        kvpool_native.CopyPool(threads)


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
