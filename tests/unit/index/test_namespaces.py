"""Namespaces over two tiers: which geometries get a size class, and where."""

from dataclasses import replace

import pytest

import kvpool_native
from kvpool.errors import LayoutMismatch, Refused
from kvpool.ids import EPOCH_BYTES
from kvpool.index.namespaces import NUMBERS_MAX, SIZE_CLASSES_MAX, Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.states import Level
from kvpool.tiers.slots import Slots, SlotSizes
from tests.rigs.flushing import flush_whole

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
DRAM_BYTES = 16 * LAYOUT.chunk_bytes
SEGMENT_BYTES = 64 * DRAM_BYTES


class Tiers:
    """DRAM, and files whose segments take chunks far larger than all of it."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(DRAM_BYTES, DRAM_BYTES, 16, 32)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES))
        self.slots = Slots("files", Level.SSD, SlotSizes(segment_bytes, 2, 32))
        self.tiers = kvpool_native.TierSet((self.directory, self.slots.directory))
        self.namespaces = Namespaces(self.directory)
        self.gone: list[str] = []
        self.namespaces.add_lower(self.slots, lambda namespace: self.gone.append(namespace.model))

    def store(self, namespace: Namespace, key: bytes) -> None:
        made = self.directory.reserve(namespace.id, namespace.size_class, b"", key, 1)
        self.directory.commit(made.id, 0, bytes(4 * namespace.layout.extents))
        self.directory.end_reservation(made.id, 1)


def layout_of(chunk_tokens: int) -> Layout:
    return Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=chunk_tokens)


def test_chunks_that_dram_refuses_use_up_no_class_of_the_files() -> None:
    tiers = Tiers()
    for number in range(SIZE_CLASSES_MAX):
        with pytest.raises(LayoutMismatch, match="cannot be stored"):
            tiers.namespaces.open("m", layout_of(32 * (17 + number)))
    assert repr(tiers.slots) == "<Slots of files, 0 geometries>"
    tiers.namespaces.open("m", LAYOUT)
    assert tiers.slots.size_class_of(LAYOUT) == 0


def test_a_layout_refused_for_lack_of_sizes_gets_the_code_full() -> None:
    tiers = Tiers()
    one, *others = [replace(layout_of(1), layers=1 + number) for number in range(SIZE_CLASSES_MAX + 1)]
    for layout in others:
        tiers.namespaces.join([tiers.namespaces.open("m", layout)])
    with pytest.raises(Refused, match=f"chunks of {SIZE_CLASSES_MAX} sizes.*flush --model") as refused:
        tiers.namespaces.open("m", one)
    assert refused.value.code == "full"  # a client that gets the code "layout" raises in its engine
    assert tiers.namespaces.verify() == []


def test_unused_size_classes_are_released_in_both_tiers() -> None:
    tiers = Tiers()
    layouts = [replace(layout_of(1 + number // 8), layers=1 + number % 8) for number in range(3 * SIZE_CLASSES_MAX)]
    for layout in layouts:
        namespace = tiers.namespaces.open("m", layout)
        assert namespace.size_class < SIZE_CLASSES_MAX
        assert tiers.namespaces.open("m", layout) is namespace
        assert tiers.namespaces.verify() == []
    assert tiers.slots.size_class_of(layouts[-1]) is not None
    assert tiers.namespaces.find("m", layouts[0]) is None


def test_a_size_with_a_chunk_stays_until_the_chunk_has_gone() -> None:
    tiers = Tiers()
    tiers.directory.mark_segment_ready(0)
    layouts = [replace(layout_of(1), layers=1 + number) for number in range(SIZE_CLASSES_MAX + 1)]
    first = tiers.namespaces.open("m", layouts[0])
    tiers.store(first, b"k" * 32)
    for layout in layouts[1:]:
        tiers.namespaces.open("m", layout)
    assert tiers.namespaces.find("m", layouts[0]) is first
    flush_whole(tiers.directory, 1 << 62, [first.id])
    for layout in layouts[1:]:
        tiers.namespaces.join([tiers.namespaces.open("m", layout)])
    assert tiers.namespaces.find("m", layouts[0]) is None
    assert tiers.namespaces.verify() == []


def test_a_number_serves_another_namespace_only_after_events_have_forgotten_it() -> None:
    tiers = Tiers()
    reused: list[int] = []
    tiers.namespaces.on_numbers_reused = lambda: reused.append(len(seen))
    seen: list[int] = []
    while len(seen) < 2 * NUMBERS_MAX:
        seen.append(tiers.namespaces.open(f"m{len(seen)}", LAYOUT).id)
    assert len(set(seen[:NUMBERS_MAX])) == NUMBERS_MAX
    assert reused[0] == NUMBERS_MAX
    assert len(reused) <= 3  # once for all that had been released by then
    assert tiers.namespaces.by_id(tiers.namespaces.all()[-1].id).model == f"m{len(seen) - 1}"
    assert tiers.namespaces.verify() == []


def test_chunks_that_the_files_have_no_room_for_are_stored_in_dram_alone() -> None:
    tiers = Tiers(segment_bytes=4096 * 2)
    large = layout_of(8 * 32)
    namespace = tiers.namespaces.open("m", large)
    assert namespace.size_class == 0
    assert tiers.slots.size_class_of(large) is None
    assert tiers.namespaces.open("m", large) is namespace


def test_a_layout_of_many_ranks_is_looked_up_once() -> None:
    namespaces = Tiers().namespaces
    layout = Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=4, rank=None, world=100)
    ranks = namespaces.open_ranks("model", layout)
    assert sorted(ranks) == list(range(100))
    assert namespaces.open_ranks("model", layout) is ranks
    assert namespaces.open_ranks("another", layout) is not ranks


STAGED = replace(LAYOUT, layers=3, rank=None, world=4, stages=(3, 1))


def test_room_for_one_stage_is_not_made_of_another() -> None:
    """63 of 64 sizes are in use: the second stage's size finds no room, and the first one's is released only after that."""
    tiers = Tiers()
    for number in range(SIZE_CLASSES_MAX - 1):
        tiers.namespaces.join([tiers.namespaces.open("m", replace(layout_of(2), layers=1 + number))])
    with pytest.raises(Refused, match=f"chunks of {SIZE_CLASSES_MAX} sizes"):
        tiers.namespaces.open_ranks("m", STAGED)
    assert tiers.namespaces.verify() == []
    single = tiers.namespaces.open_ranks("m", replace(STAGED, stages=(3, 3)))
    assert len({namespace.size_class for namespace in single.values()}) == 1
    assert all(tiers.namespaces.find("m", each.layout) is each for each in single.values())


def test_all_sizes_of_a_users_stages_count_for_its_share() -> None:
    tiers = Tiers()
    namespaces = Namespaces(tiers.directory, user_quota=0.5)
    user = 1000
    for number in range(SIZE_CLASSES_MAX // 2 - 1):
        namespaces.join(namespaces.open_ranks("m", replace(layout_of(2), layers=1 + number), user).values(), user)
    with pytest.raises(Refused, match="chunk sizes"):
        namespaces.open_ranks("m", STAGED, user)
    namespaces.open_ranks("m", replace(STAGED, stages=(3, 3)), user)


def test_a_header_has_room_for_the_checksums_of_summaries_too() -> None:
    layout = Layout(layers=3, kv_heads=1, head_dim=32, dtype="float16", chunk_tokens=32, summaries="mean")
    assert layout.extents == 4
    for extents_max, fits in ((3, False), (4, True)):
        assert Slots("files", Level.SSD, SlotSizes(SEGMENT_BYTES, 1, 32, extents_max=extents_max)).fits(layout) is fits
