"""The native directory through its Python binding, against a dict.

Random requests are seeded by hypothesis; `verify()` runs after each of them.
"""

import os
import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_native import Directory, DirectoryGeometry, IndexView, Mapping, Reserved
from tests.rigs.flushing import flush_whole

PAGE = 4096
CHUNK = 2 * PAGE
EXTENTS = 3
PRESENT, RESERVED, PENDING, NO_PARENT, FULL, NOT_READY, FOREIGN, STORED, EXPIRED = range(9)
FOREVER = 2**63


def key(name: int) -> bytes:
    return random.Random(name).randbytes(32)


def keys(names: Sequence[int]) -> bytes:
    return b"".join(key(name) for name in names)


def sums(chunks: int, extents: int = EXTENTS) -> bytes:
    return struct.pack(f"<{chunks * extents}I", *range(1, chunks * extents + 1))


class Store:
    """A directory over small regions, with a clock that counts calls."""

    def __init__(self, capacity: int, *, max_chunks: int = 1000, segment: int = 64 << 20, ready: bool = True) -> None:
        self.geometry = DirectoryGeometry.plan(capacity, segment, max_chunks)
        self.arena = Mapping.create("arena", self.geometry.arena_bytes)
        self.index = Mapping.create("index", self.geometry.index_bytes)
        self.epoch = os.urandom(16)
        self.directory = Directory(self.arena, self.index, self.geometry, self.epoch)
        self.view = IndexView(Mapping.attach(self.index.fd, self.index.size, writable=False))
        self.namespace = self.directory.add_namespace()
        self.size_class = self.directory.add_class(CHUNK, EXTENTS)
        self.now = 0
        for segment_index in range(self.geometry.segments if ready else 0):
            self.directory.mark_segment_ready(segment_index)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def reserve(self, names: Sequence[int], parent: int | None = None, *, size_class: int | None = None) -> Reserved:
        above = b"" if parent is None else key(parent)
        chosen = self.size_class if size_class is None else size_class
        return self.directory.reserve(self.namespace, chosen, above, keys(names), self.tick())

    def store(self, names: Sequence[int], parent: int | None = None) -> bytes:
        made = self.reserve(names, parent)
        if made.id:
            answers = self.directory.commit(made.id, 0, sums(made.states.count(RESERVED)))
            assert set(answers) == {STORED}
            assert self.directory.end_reservation(made.id, self.tick())
        return made.states

    def find(self, names: Sequence[int]) -> int:
        return self.view.lookup(keys(names))[0]

    def verify(self) -> None:
        assert self.directory.verify() == []


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
    assert not directory.release(12345, 1)
    store.verify()


def test_stored_chunks_are_found_with_their_columns() -> None:
    store = Store(20 * CHUNK)
    made = store.reserve([1, 2, 3])
    assert made.states == bytes([RESERVED] * 3)
    assert store.find([1]) == 0
    assert store.directory.commit(made.id, 0, sums(3)) == bytes([STORED] * 3)
    assert store.view.lookup(keys([1, 2, 3, 4])) == (3, b"\x01\x01\x01")
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


def test_present_chunks_alone_need_no_reservation_but_are_refreshed() -> None:
    store = Store(4 * CHUNK)
    store.store([1, 2])
    store.store([3, 4])
    made = store.reserve([1, 2])
    assert made.id == 0
    assert made.states == bytes([PRESENT] * 2)
    assert len(made.offsets) == 16
    store.store([5, 6])
    assert store.find([1, 2]) == 2
    assert store.find([3]) == 0
    store.verify()


def test_eviction_takes_the_oldest_leaf_and_only_what_is_missing() -> None:
    store = Store(4 * CHUNK)
    store.store([1, 2, 3, 4])
    for new, left in ((5, 3), (6, 2), (7, 1)):
        store.store([new])
        assert store.find([1, 2, 3, 4]) == left
    assert store.directory.stats()["evicted_chunks"] == 3
    store.verify()


def test_held_chunks_are_never_victims() -> None:
    store = Store(4 * CHUNK)
    store.store([1, 2, 3])
    held = store.directory.acquire(store.namespace, keys([1, 2]))
    assert held.chunks == 2
    (copy,) = store.directory.duplicate([held.id])
    assert store.directory.release(held.id, store.tick())
    assert store.store([10, 11, 12]) == bytes([RESERVED, RESERVED, FULL])
    assert store.find([1, 2, 3]) == 2
    assert store.directory.release(copy, store.tick())
    assert store.store([20, 21, 22, 23]) == bytes([RESERVED] * 4)
    store.verify()


def test_zombie_slots_are_not_reused_before_their_writer_has_stopped() -> None:
    store = Store(2 * CHUNK)
    made = store.reserve([1, 2])
    assert store.directory.expire_part(made.id, 2, store.tick())
    assert store.directory.commit(made.id, 0, sums(2)) == bytes([EXPIRED] * 2)
    assert store.directory.stats()["zombies"] == 2
    assert store.store([3]) == bytes([FULL])
    store.verify()
    assert store.directory.end_reservation(made.id, store.tick())
    reserved = store.reserve([3, 4])
    assert reserved.states == bytes([RESERVED] * 2)
    assert set(np.frombuffer(reserved.offsets, "<u8")) == set(np.frombuffer(made.offsets, "<u8"))
    assert store.directory.end_reservation(reserved.id, store.tick())
    store.verify()


def test_pending_missing_parent_and_foreign_chunks_are_distinguished() -> None:
    store = Store(8 * CHUNK)
    store.reserve([1, 2])
    assert store.reserve([1, 2]).states == bytes([PENDING] * 2)
    assert store.reserve([9], parent=3).states == bytes([NO_PARENT])
    other = store.directory.add_namespace()
    answer = store.directory.reserve(other, store.size_class, b"", key(1), store.tick())
    assert answer.states == bytes([FOREIGN])
    stats = store.directory.stats()
    assert (stats["answered_pending"], stats["answered_no_parent"], stats["answered_foreign"]) == (2, 1, 1)
    store.verify()


def test_segments_that_are_not_ready_decline_as_such() -> None:
    store = Store(8 * CHUNK, ready=False)
    assert store.directory.stats()["ready_segments"] == 0
    assert store.reserve([1]).states == bytes([NOT_READY])
    for segment in range(store.geometry.segments):
        store.directory.mark_segment_ready(segment)
    assert store.directory.stats()["ready_segments"] == store.geometry.segments
    assert store.store([1]) == bytes([RESERVED])
    store.verify()


def test_two_size_classes_exchange_segments() -> None:
    store = Store(64 * CHUNK, segment=8 * CHUNK)
    large = store.directory.add_class(8 * CHUNK, EXTENTS)
    assert store.directory.add_class(8 * CHUNK, EXTENTS) == large
    assert store.store(range(64)) == bytes([RESERVED] * 64)
    for name in range(100, 108):
        made = store.reserve([name], size_class=large)
        assert made.states == bytes([RESERVED])
        store.directory.commit(made.id, 0, sums(1))
        store.directory.end_reservation(made.id, store.tick())
        store.verify()
    assert store.find([0]) == 0
    stats = store.directory.stats()
    assert stats["evicted_chunks"] == 64
    assert [row["slots_used"] for row in stats["classes"]] == [0, 8]
    assert store.store(range(200, 264)) == bytes([RESERVED] * 64)
    assert [row["slots_used"] for row in store.directory.stats()["classes"]] == [64, 0]
    store.verify()


def test_a_leaf_is_held_with_its_whole_prefix() -> None:
    store = Store(20 * CHUNK)
    store.store([1, 2, 3])
    held = store.directory.acquire_leaves([store.namespace], key(3), 3)
    assert (held.chunks, len(store.directory.columns([held.ids[0]]).levels)) == (3, 3)
    for leaf, chunks in ((3, 2), (4, 3)):
        none = store.directory.acquire_leaves([store.namespace], key(leaf), chunks)
        assert (none.chunks, none.ids) == (0, [0])
    with pytest.raises(ValueError, match="one key"):
        store.directory.acquire_leaves([store.namespace], key(3) * 2, 3)
    store.verify()


def test_a_dropped_chunk_is_a_miss_and_is_removed_when_released() -> None:
    store = Store(8 * CHUNK)
    store.store([1, 2, 3])
    held = store.directory.acquire(store.namespace, keys([1, 2]))
    slots = store.directory.columns([held.id])
    slot, generation = (int(np.frombuffer(column, "<u8")[1]) for column in (slots.slots, slots.generations))
    assert store.directory.drop(key(2), generation - 1) == 0
    assert store.directory.drop(key(2), generation) == 2
    assert store.view.generation_at(slot) == 0
    assert store.directory.columns([held.id]).levels == bytes([1, 255])
    assert store.directory.stats()["used_bytes"] == CHUNK, "a reader keeps no slot"
    assert store.directory.stats()["zombies"] == 1
    assert store.directory.release(held.id, store.tick())
    assert store.directory.stats()["used_bytes"] == CHUNK
    store.verify()


def test_flush_skips_held_and_recent_chunks() -> None:
    store = Store(20 * CHUNK)
    store.store([1, 2])
    middle = store.tick()
    store.store([3])
    held = store.directory.acquire(store.namespace, key(1))
    assert flush_whole(store.directory, middle, [store.namespace]) == (1, CHUNK, 1)
    assert flush_whole(store.directory, FOREVER) == (1, CHUNK, 1)
    assert store.directory.release(held.id, store.tick())
    assert flush_whole(store.directory, FOREVER) == (1, CHUNK, 0)
    assert store.directory.stats()["flushed_chunks"] == 3
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


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), min_size=20, max_size=120))
def test_random_requests_agree_with_a_dict(steps: list[tuple[int, int]]) -> None:
    """Names form trees: the parent of `name` is `name // 3`. Whatever was stored is found unless it was evicted."""
    store = Store(16 * CHUNK, max_chunks=20, segment=4 * CHUNK)
    stored: dict[int, int] = {}  # name -> generation
    holds: dict[int, list[int]] = {}
    evicted = 0
    for verb, number in steps:
        names: list[int] = []
        while number:
            names.insert(0, number)
            number //= 3
        if verb <= 2 and names:
            made = store.reserve(names)
            placed = [state <= RESERVED for state in made.states].count(True)
            assert all(names[index] in stored for index in range(made.states.count(PRESENT)))
            assert made.states[:placed] == bytes(sorted(made.states[:placed]))
            assert set(made.states[placed + 1 :]) <= {NO_PARENT}  # what follows the first that was declined
            if made.id:
                done = made.states.count(RESERVED) - (verb == 2)
                store.directory.commit(made.id, 0, sums(done))
                store.directory.end_reservation(made.id, store.tick())
                for index in range(placed - made.states.count(RESERVED), placed - (verb == 2)):
                    stored[names[index]] = int(np.frombuffer(made.generations, "<u8")[index])
        elif verb == 3:
            found = store.directory.acquire(store.namespace, keys(names))
            assert found.chunks == store.find(names)
            assert all(name in stored for name in names[: found.chunks])
            if found.id:
                held = np.frombuffer(store.directory.columns([found.id]).generations, "<u8").tolist()
                assert held == [stored[name] for name in names[: found.chunks]]
                holds[found.id] = names[: found.chunks]
        elif verb == 4 and holds:
            hold = list(holds)[len(names) % len(holds)]
            assert store.directory.release(hold, store.tick())
            del holds[hold]
        store.verify()
        gone = [name for name in stored if store.view.lookup(key(name))[0] == 0]
        assert not {name for chain in holds.values() for name in chain} & set(gone)
        assert not [name for name in stored if name // 3 in gone and name not in gone]  # leaf first
        for name in gone:
            del stored[name]
        evicted += len(gone)
        stats = store.directory.stats()
        assert stats["evicted_chunks"] == evicted
        assert stats["chunks"] == len(stored)
        assert stats["stored_chunks"] == len(stored) + evicted
