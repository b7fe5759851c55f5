"""The native halves of a save by copy: some extents into staging, and from there into slots. Addresses outside are refused."""

from collections.abc import Iterator

import numpy as np
import pytest

import kvpool_native
from tests.rigs.native_copies import CHUNK_BYTES, EXTENT_BYTES, EXTENTS, LONG_S, Engine, Store, column, some_ids

FIRST, SOME = 1, 2  # extents


@pytest.fixture
def pool() -> Iterator[kvpool_native.CopyPool]:
    made = kvpool_native.CopyPool(1)
    yield made
    made.stop()


@pytest.fixture
def staging() -> kvpool_native.Mapping:
    return kvpool_native.Mapping.create("staging", 64 << 10)


def test_some_extents_of_a_save_go_through_staging_into_their_slots(
    pool: kvpool_native.CopyPool, staging: kvpool_native.Mapping
) -> None:
    store, engine, ids = Store(), Engine("kv_first", 16), some_ids(8)
    expected = [
        np.frombuffer(chunk, np.uint8).reshape(EXTENTS, EXTENT_BYTES)[FIRST : FIRST + SOME]
        for chunk in engine.chunks(ids)
    ]
    starts = column([64 + number * SOME * EXTENT_BYTES for number in range(2)])
    job = pool.save(engine.view, staging, starts, column(ids), SOME, EXTENT_BYTES, FIRST)
    job.announce_all()
    assert job.wait(LONG_S)
    slots = np.frombuffer(store.reserve(2), np.uint64)
    before = store.bytes.copy()
    targets = (slots + np.uint64(FIRST * EXTENT_BYTES)).tobytes()
    sums = kvpool_native.copy_extents(store.arena, targets, staging, 64, SOME, EXTENT_BYTES)
    assert sums == job.checksums()
    assert sums == np.array([[kvpool_native.crc32c(row) for row in rows] for rows in expected], np.uint32).tobytes()
    for slot, rows in zip(slots.tolist(), expected, strict=True):
        at = slot + FIRST * EXTENT_BYTES
        before[at : at + SOME * EXTENT_BYTES] = rows.reshape(-1)
    assert np.array_equal(store.bytes, before)


@pytest.mark.parametrize(("first", "extents"), [(0, EXTENTS + 1), (1, EXTENTS), (EXTENTS, 1), (2**32 - 1, 1), (0, 0)])
def test_extents_that_the_view_lacks_are_refused(
    pool: kvpool_native.CopyPool, staging: kvpool_native.Mapping, first: int, extents: int
) -> None:
    with pytest.raises(ValueError, match="extents"):
        pool.save(Engine("kv_first", 16).view, staging, column([0]), column(some_ids(4)), extents, EXTENT_BYTES, first)


@pytest.mark.parametrize(
    ("targets", "offset", "extents", "extent_bytes"),
    [
        ([0, 2**62], 0, EXTENTS, EXTENT_BYTES),
        ([0, -1], 0, EXTENTS, EXTENT_BYTES),
        ([0], (64 << 10) - CHUNK_BYTES + 1, EXTENTS, EXTENT_BYTES),
        ([0], 2**64 - 1, EXTENTS, EXTENT_BYTES),
        ([0] * 100, 0, EXTENTS, EXTENT_BYTES),
        ([0], 0, 0, EXTENT_BYTES),
        ([0], 0, EXTENTS, 0),
        ([0], 0, EXTENTS, 2**63),
        ([], 0, EXTENTS, 2**63),
    ],
)
def test_a_copy_from_or_to_outside_is_refused(
    staging: kvpool_native.Mapping, targets: list[int], offset: int, extents: int, extent_bytes: int
) -> None:
    arena = kvpool_native.Mapping.create("arena", 1 << 20)
    staging.view()[:] = 1  # what is copied would be seen
    with pytest.raises(ValueError, match=r"."):
        kvpool_native.copy_extents(arena, column(targets), staging, offset, extents, extent_bytes)
    assert not arena.view().any()


def test_nothing_is_copied_through_a_read_only_mapping(staging: kvpool_native.Mapping) -> None:
    store = Store()
    reader = kvpool_native.Mapping.attach(store.arena.fd, store.arena.size, False)
    with pytest.raises(ValueError, match="read-only"):
        kvpool_native.copy_extents(reader, store.reserve(1), staging, 0, EXTENTS, EXTENT_BYTES)
