"""Namespaces over two tiers: which geometries get a size class, and where."""

from dataclasses import replace

import pytest

import kvpool_native
from kvpool.errors import LayoutMismatch, Refused
from kvpool.index.namespaces import SIZE_CLASSES_MAX, Namespaces
from kvpool.layout import Layout
from kvpool.tiers.ssd_classes import SsdClasses
from kvpool.types import EPOCH_BYTES

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
DRAM_BYTES = 16 * LAYOUT.chunk_bytes
SEGMENT_BYTES = 64 * DRAM_BYTES


class Tiers:
    """DRAM, and files whose segments take chunks far larger than all of it."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(DRAM_BYTES, DRAM_BYTES, 16, 32)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES))
        self.files = kvpool_native.Directory.of_files(kvpool_native.DirectoryGeometry.plan_files(segment_bytes, 2, 32))
        self.directory.attach_slower(self.files)
        self.namespaces = Namespaces(self.directory)
        self.namespaces.below = self.files
        self.classes = SsdClasses(self.files, segment_bytes)
        self.namespaces.classes_below = self.classes


def layout_of(chunk_tokens: int) -> Layout:
    return Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=chunk_tokens)


def test_chunks_that_dram_refuses_use_up_no_class_of_the_files() -> None:
    tiers = Tiers()
    for number in range(SIZE_CLASSES_MAX):
        with pytest.raises(LayoutMismatch, match="cannot be stored"):
            tiers.namespaces.open("m", layout_of(32 * (17 + number)))
    assert repr(tiers.classes) == "<SsdClasses 0 geometries>"
    tiers.namespaces.open("m", LAYOUT)
    assert tiers.classes.of(LAYOUT) == 0


def test_a_layout_is_not_to_blame_where_there_are_too_many_sizes_already() -> None:
    tiers = Tiers()
    one, *others = [replace(layout_of(1), layers=1 + number) for number in range(SIZE_CLASSES_MAX + 1)]
    for layout in others:
        tiers.namespaces.open("m", layout)
    with pytest.raises(Refused, match=f"{SIZE_CLASSES_MAX} chunk sizes already") as refused:
        tiers.namespaces.open("m", one)
    assert refused.value.code == "full"  # a client that is told "layout" raises in its engine


def test_chunks_that_the_files_have_no_room_for_are_stored_in_dram_alone() -> None:
    tiers = Tiers(segment_bytes=4096 * 2)
    large = layout_of(8 * 32)
    namespace = tiers.namespaces.open("m", large)
    assert namespace.size_class == 0
    assert tiers.classes.of(large) is None
    assert tiers.namespaces.open("m", large) is namespace


def test_a_layout_of_many_ranks_is_looked_up_once() -> None:
    namespaces = Tiers().namespaces
    layout = Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=4, rank=None, world=100)
    ranks = namespaces.open_ranks("model", layout)
    assert sorted(ranks) == list(range(100))
    assert namespaces.open_ranks("model", layout) is ranks
    assert namespaces.open_ranks("another", layout) is not ranks
