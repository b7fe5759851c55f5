"""Rows that cross to native code packed: the numpy types and structs of what the native module declares.

Each row is declared once, as a C++ struct; the native module hands out its layout (`native/bindings/bind_rows.cpp`), and
everything here is made of that. Little endian. Pure; any thread.
"""

import struct

import numpy as np

import kvpool_native

# Names of bytes that say nothing, in any row.
UNUSED = "unused"
_CODES = {1: "B", 4: "I", 8: "Q"}


def _row_type(layout: kvpool_native.RowLayout) -> "np.dtype[np.void]":
    """The numpy type of a row."""
    return np.dtype(
        {
            "names": layout.names,
            "formats": layout.formats,
            "offsets": layout.offsets,
            "itemsize": layout.bytes,
        }
    )


def struct_of(row: "np.dtype[np.void]", first: str, last: str) -> tuple[struct.Struct, int]:
    """The struct of a row's fields from one to another, and where it begins. Scalars are packed faster so than by numpy."""
    assert row.names is not None
    assert row.fields is not None
    names = row.names[row.names.index(first) : row.names.index(last) + 1]
    kinds = [row.fields[name][0] for name in names]
    codes = [
        _CODES[kind.itemsize] if kind.kind == "u" else f"{kind.itemsize}{'x' if name == UNUSED else 's'}"
        for name, kind in zip(names, kinds, strict=True)
    ]
    return struct.Struct("<" + "".join(codes)), row.fields[first][1]


MOVE_ROW = _row_type(kvpool_native.MOVE_ROW)
RESTORE_ROW = _row_type(kvpool_native.RESTORE_ROW)
CATALOGUE_ROW = _row_type(kvpool_native.CATALOGUE_ROW)
CHANGE_ROW = _row_type(kvpool_native.CHANGE_ROW)
DEVICE_MOVE_ROW = _row_type(kvpool_native.DEVICE_MOVE_ROW)
