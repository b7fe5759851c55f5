"""Rows that cross to native code: their types are the structs, byte for byte."""

import struct
from pathlib import Path

import numpy as np
import pytest

import kvpool_native
from kvpool import packed_rows
from kvpool.journal.event_log import Change
from kvpool.row_structs import UNUSED, struct_of
from kvpool.tiers.base import Moves

GOLDEN = Path(__file__).parents[2] / "golden"
ROWS = {
    "MOVE_ROW": "<32s32sQQQQ",
    "RESTORE_ROW": "<32s32sQQIIII",
    "CATALOGUE_ROW": "<32s32sQQQQIIIIII",
    "CHANGE_ROW": "<32s32sIIBBBBBB2x",
    "DEVICE_MOVE_ROW": "<QQQQQQ",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_type_has_the_sizes_and_offsets_of_the_struct(name: str) -> None:
    row, layout = getattr(packed_rows, name), getattr(kvpool_native, name)
    assert row.itemsize == layout.bytes == struct.calcsize(ROWS[name])
    assert list(row.names) == layout.names
    assert [row.fields[field][1] for field in row.names] == layout.offsets
    whole, at = struct_of(layout, row.names[0], row.names[-1])
    assert (whole.format, at) == (ROWS[name], 0)
    ends = [row.fields[field][1] + row.fields[field][0].itemsize for field in row.names]
    assert layout.offsets == [0, *ends[:-1]], "a hole: its bytes would be whatever was there"
    assert ends[-1] == layout.bytes


def test_every_row_that_the_native_module_declares_has_a_type() -> None:
    declared = {
        name for name in dir(kvpool_native) if isinstance(getattr(kvpool_native, name), kvpool_native.RowLayout)
    }
    assert declared == set(ROWS) == {name for name in dir(packed_rows) if name.endswith("_ROW")}


def test_a_part_of_a_row_begins_where_its_first_field_does() -> None:
    kept, at = struct_of(kvpool_native.CATALOGUE_ROW, "priority", "duration_s")
    row = (GOLDEN / "catalogue_row.bin").read_bytes()
    assert kept.unpack_from(row, at) == (80, 3600)


def test_moves_are_packed_as_native_code_reads_them() -> None:
    keys, parents = [bytes([1]) * 32, bytes([2]) * 32], [b"", bytes([1]) * 32]
    rows = np.frombuffer(
        Moves(
            keys,
            parents,
            offsets=[4096, 8192],
            arena_offsets=[0, 1 << 40],
            arena_slots=[5, 6],
            generations=[7, 1 << 61],
        ).rows(),
        packed_rows.MOVE_ROW,
    )
    assert [bytes(row["key"]) for row in rows] == keys
    assert [bytes(row["parent"]) for row in rows] == [bytes(32), keys[0]]
    assert [
        tuple(map(int, (row["offset"], row["arena_offset"], row["arena_slot"], row["generation"]))) for row in rows
    ] == [(4096, 0, 5, 7), (8192, 1 << 40, 6, 1 << 61)]


def test_a_change_is_named_field_by_field() -> None:
    assert (*Change._fields, UNUSED) == packed_rows.CHANGE_ROW.names
