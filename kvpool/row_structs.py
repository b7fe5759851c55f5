"""Structs of rows that cross to native code packed, made of what the native module declares.

Each row is declared once, as a C++ struct; the native module hands out its layout (`native/bindings/bind_rows.cpp`). Scalars
are packed faster so than by numpy, whose types of the same rows are in `packed_rows.py`. Little endian. Pure; any thread.
"""

import struct

import kvpool_native

# Names of bytes that say nothing, in any row.
UNUSED = "unused"
_CODES = {"<u1": "B", "<u4": "I", "<u8": "Q"}


def struct_of(row: kvpool_native.RowLayout, first: str, last: str) -> tuple[struct.Struct, int]:
    """The struct of a row's fields from one to another, and where it begins."""
    begin, end = row.names.index(first), row.names.index(last) + 1
    codes = [
        _CODES.get(kind) or f"{kind[1:]}{'x' if name == UNUSED else 's'}"
        for name, kind in zip(row.names[begin:end], row.formats[begin:end], strict=True)
    ]
    return struct.Struct("<" + "".join(codes)), row.offsets[begin]
