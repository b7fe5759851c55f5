"""Usage report as a column: u64 little endian, in the order below.

    lookups, chunks looked up, loads,
    chunks hit by level, chunks loaded by level, failed loads by `LoadReason`, declined chunks as `CLIENT_DECLINES`

Every report of a version of the protocol has the same length: before version 4 there was no level STORE, whose chunks count as
PEER's for a peer of those. Pure functions; any thread.
"""

import struct

from kvpool.errors import ProtocolError
from kvpool.types import CLIENT_DECLINES, LEVELS, Level, LoadReason, UsageReport

LOOKUPS, LOOKUP_CHUNKS, LOADS = range(3)
HIT_CHUNKS = 3
LOADED_CHUNKS = HIT_CHUNKS + LEVELS
FAILED_LOADS = LOADED_CHUNKS + LEVELS
DECLINED_CHUNKS = FAILED_LOADS + len(LoadReason)
COUNTS = DECLINED_CHUNKS + len(CLIENT_DECLINES)
_COLUMN = struct.Struct(f"<{COUNTS}Q")
_STORE_SINCE = 4
_STORE_PLACES = (HIT_CHUNKS + Level.STORE, LOADED_CHUNKS + Level.STORE)
_COLUMN_BEFORE = struct.Struct(f"<{COUNTS - len(_STORE_PLACES)}Q")


def pack(counts: list[int], version: int) -> bytes:
    """The column of `COUNTS` counts for a peer of this version."""
    if version >= _STORE_SINCE:
        return _COLUMN.pack(*counts)
    older = list(counts)
    for place in reversed(_STORE_PLACES):
        older[place - 1] += older.pop(place)
    return _COLUMN_BEFORE.pack(*older)


def unpack(column: bytes) -> UsageReport:
    """The report in a column. Raises ProtocolError unless it has exactly the length of some version."""
    if len(column) == _COLUMN_BEFORE.size:
        older = list(_COLUMN_BEFORE.unpack(column))
        for place in _STORE_PLACES:
            older.insert(place, 0)
        column = _COLUMN.pack(*older)
    if len(column) != _COLUMN.size:
        raise ProtocolError(f"usage column has {len(column)} bytes, expected {_COLUMN.size}")
    counts = _COLUMN.unpack(column)
    return UsageReport(
        lookups=counts[LOOKUPS],
        lookup_chunks=counts[LOOKUP_CHUNKS],
        loads=counts[LOADS],
        hit_chunks=counts[HIT_CHUNKS:LOADED_CHUNKS],
        loaded_chunks=counts[LOADED_CHUNKS:FAILED_LOADS],
        failed_loads=counts[FAILED_LOADS:DECLINED_CHUNKS],
        declined_chunks=counts[DECLINED_CHUNKS:],
    )
