"""The native directory through its Python binding: what crosses, and what is refused. What it does: native/tests/directory."""

import numpy as np
import pytest

from kvpool_native import TOKEN_IDS_MAX, Directory, DirectoryGeometry, IndexView, Mapping
from tests.rigs.native_directory import CHUNK, EXTENTS, PAGE, RESERVED, STORED, Store, key, keys, sums


def test_geometry_is_planned_before_memory_is_mapped() -> None:
    plan = DirectoryGeometry.plan(1 << 30, 64 << 20, 1000)
    assert (plan.segment_bytes, plan.segments, plan.arena_bytes) == (64 << 20, 17, 17 * (64 << 20))
    assert plan.max_chunks == 1000
    assert plan.index_bytes % PAGE == 0
    with pytest.raises(ValueError, match="out of range"):
        DirectoryGeometry.plan(0, 64 << 20, 1000)


def test_regions_that_do_not_fit_the_plan_are_refused() -> None:
    plan = DirectoryGeometry.plan(8 * CHUNK, 64 << 20, 10)
    arena = Mapping.create("arena", plan.arena_bytes)
    index = Mapping.create("index", plan.index_bytes)
    small = Mapping.create("small", PAGE)
    with pytest.raises(ValueError, match="16 bytes"):
        Directory(arena, index, plan, b"short")
    with pytest.raises(ValueError, match="arena region"):
        Directory(small, index, plan, bytes(16))
    with pytest.raises(ValueError, match="index region"):
        Directory(arena, small, plan, bytes(16))
    with pytest.raises(ValueError, match="not an index"):
        IndexView(small)
    Directory(arena, index, plan, bytes(16))
    with pytest.raises(ValueError, match="in use"):
        Directory(arena, index, plan, bytes(16))


def test_mapping_errors_are_os_errors() -> None:
    with pytest.raises(OSError, match="size"):
        Mapping.create("odd", 100)
    mapping = Mapping.create("pages", 4 * PAGE)
    with pytest.raises(ValueError, match="whole pages"):
        mapping.populate(PAGE, 4 * PAGE)
    mapping.populate(0, 4 * PAGE)
    assert mapping.collapse(0, 4 * PAGE) in (True, False)
    mapping.seal_read_only()
    with pytest.raises(PermissionError):
        Mapping.attach(mapping.fd, mapping.size, writable=True)
    mapping.view()[7] = 9
    reader = Mapping.attach(mapping.fd, mapping.size, writable=False)
    view = reader.view()
    del reader
    assert view[7] == 9
    assert view.dtype == np.uint8


def test_wrong_arguments_are_refused_at_the_call() -> None:
    store = Store(8 * CHUNK)
    directory = store.directory
    with pytest.raises(ValueError, match="multiple of 32"):
        directory.acquire(store.namespace, b"x" * 33)
    with pytest.raises(ValueError, match="32 bytes"):
        directory.drop(b"x", 1)
    with pytest.raises(ValueError, match="32 bytes"):
        directory.reserve(store.namespace, store.size_class, b"x", key(1), 1)
    with pytest.raises(ValueError, match="within the keys"):
        directory.reserve(store.namespace, store.size_class, b"", key(1), 1, first=2)
    with pytest.raises(IndexError):
        directory.acquire(99, key(1))
    with pytest.raises(IndexError):
        directory.reserve(store.namespace, 99, b"", key(1), 1)
    with pytest.raises(IndexError):
        directory.mark_segment_ready(store.geometry.segments)
    with pytest.raises(ValueError, match="does not fit"):
        directory.add_class(9 * CHUNK, 1)
    with pytest.raises(KeyError):
        directory.columns([12345])
    with pytest.raises(KeyError):
        directory.duplicate([12345])
    with pytest.raises(KeyError):
        directory.commit(12345, 0, b"")
    made = store.reserve([1])
    with pytest.raises(ValueError, match="each extent"):
        directory.commit(made.id, 0, b"1234")
    with pytest.raises(ValueError, match="as many for each chunk"):
        directory.commit(made.id, 0, sums(1), 0, bytes(3))
    with pytest.raises(ValueError, match="4096 at most"):
        directory.commit(made.id, 0, sums(1), 0, bytes(4 * (TOKEN_IDS_MAX + 1)))
    assert not directory.release(12345, 1)
    store.verify()


def test_rows_of_columns_are_committed_as_they_stand_with_the_scope_behind_the_ids_of_each() -> None:
    store = Store(8 * CHUNK)
    directory, made = store.directory, store.reserve([1, 2, 3, 4])
    tokens, scope = np.arange(4 * 5, dtype="<i4"), np.arange(90, 94, dtype="<i4").tobytes()
    checksums = sums(5)
    with pytest.raises(ValueError, match="row must be within"):
        directory.commit(made.id, 0, checksums, 0, row=6)
    with pytest.raises(ValueError, match="4096 at most"):
        directory.commit(made.id, 0, sums(1), 0, bytes(4 * TOKEN_IDS_MAX), scope=scope)
    with pytest.raises(ValueError, match="4096 at most"):
        directory.commit(made.id, 0, sums(1), 0, bytes(4), scope=b"odd")
    states = directory.commit(made.id, 0, checksums, 0, tokens.tobytes(), scope=scope, row=1, rows=2)
    assert list(states) == [STORED] * 2
    assert list(directory.commit(made.id, 2, checksums, 0, tokens.tobytes(), row=3)) == [STORED] * 2
    found = [directory.tokens_of(key(each)) for each in (1, 2, 3, 4)]
    ids = [tokens[at : at + 4].tobytes() for at in (4, 8, 12, 16)]
    assert found == [ids[0] + scope, ids[1] + scope, ids[2], ids[3]]
    store.verify()


def test_stored_chunks_are_found_with_their_columns() -> None:
    store = Store(20 * CHUNK)
    made = store.reserve([1, 2, 3])
    assert made.states == bytes([RESERVED] * 3)
    assert store.find([1]) == 0
    assert store.directory.commit(made.id, 0, sums(3)) == bytes([STORED] * 3)
    assert store.view.lookup(keys([1, 2, 3, 4])) == b"\x01\x01\x01"
    held = store.directory.acquire(store.namespace, keys([1, 2, 3, 4]))
    assert held.chunks == 3
    slots = store.directory.columns([held.id])
    assert (slots.offsets, slots.generations, slots.levels) == (made.offsets, made.generations, b"\x01\x01\x01")
    assert slots.slots == made.slots
    slot = int(np.frombuffer(made.slots, "<u8")[2])
    assert store.view.generation_at(slot) == int(np.frombuffer(made.generations, "<u8")[2])
    assert [store.view.checksum_at(slot, extent) for extent in range(EXTENTS)] == [7, 8, 9]
    assert store.view.covers(slot, EXTENTS)
    for elsewhere in (slot + (1 << 32), 1 << 31, (1 << 64) - 1):
        assert not store.view.covers(elsewhere, 1)
        assert (store.view.generation_at(elsewhere), store.view.checksum_at(elsewhere, 0)) == (0, 0)
    assert store.view.epoch == store.epoch
    assert store.view.count == 3
    counts = store.directory.stats()
    assert (counts["chunks"], counts["used_bytes"]) == (3, 3 * CHUNK)
    store.verify()


def test_records_are_walked_in_pages_while_pinned() -> None:
    store = Store(20 * CHUNK)
    store.store([1, 2, 3, 4, 5])
    seen = set()
    cursor = 0
    while True:
        page = store.directory.records(cursor, 2)
        assert len(page.records) <= 2
        slots = np.frombuffer(store.directory.columns([page.pin]).slots, "<u8").tolist() if page.records else []
        for slot, row in zip(slots, page.records, strict=True):
            assert store.view.generation_at(slot) == row.generation
            assert (row.chunk_bytes, row.extents, row.namespace) == (CHUNK, EXTENTS, store.namespace)
            seen.add(row.key)
        assert store.directory.unpin(page.pin) == bool(page.records)
        cursor = page.next
        if not cursor:
            break
    assert seen == {key(name) for name in range(1, 6)}
    store.verify()


def test_token_ids_beyond_the_budget_are_left_out_and_their_chunks_stored() -> None:
    store = Store(16 * CHUNK)
    directory = store.directory
    directory.limit_token_ids(2 * 28)
    reserved = store.reserve([1, 2, 3])
    ids = np.arange(3 * 7, dtype="<i4")
    assert set(directory.commit(reserved.id, 0, sums(3), 0, ids.tobytes())) == {STORED}
    assert directory.end_reservation(reserved.id, store.tick())
    assert [directory.tokens_of(key(name)) for name in (1, 2, 3)] == [ids[:7].tobytes(), ids[7:14].tobytes(), b""]
    stats = directory.stats()
    assert (stats["chunks"], stats["token_id_bytes"], stats["token_ids_left_out"]) == (3, 56, 1)
    directory.discard(key(2))
    store.store([9])
    further = store.reserve([10])
    directory.commit(further.id, 0, sums(1), 0, ids[:7].tobytes())
    directory.end_reservation(further.id, store.tick())
    assert directory.tokens_of(key(10)) == ids[:7].tobytes()
    assert directory.stats()["token_ids_left_out"] == 1
    store.verify()
