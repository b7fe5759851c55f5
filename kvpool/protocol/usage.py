"""Usage report as a column: u64 little endian, in the order below.

    lookups, chunks looked up, loads,
    chunks hit by level, chunks loaded by level, failed loads by `LoadReason`, declined chunks as `CLIENT_DECLINES`,
    compute by lookup as `SPARSE_COUNTS`

Every report of a version of the protocol has the same length: before version 4 there was no level STORE, whose chunks count as
PEER's for a peer of those, and before version 7 nothing of compute by lookup, before version 8 nothing of that on devices:
a peer of those does not get it.
Pure functions; any thread.
"""

import struct
from collections.abc import Sequence

from kvpool.errors import ProtocolError
from kvpool.types import (
    CLIENT_DECLINES,
    HOST_SPARSE_COUNTS,
    LEVELS,
    SPARSE_COUNTS,
    Level,
    LoadReason,
    SparseUsage,
    UsageReport,
)

LOOKUPS, LOOKUP_CHUNKS, LOADS = range(3)
HIT_CHUNKS = 3
LOADED_CHUNKS = HIT_CHUNKS + LEVELS
FAILED_LOADS = LOADED_CHUNKS + LEVELS
DECLINED_CHUNKS = FAILED_LOADS + len(LoadReason)
SPARSE = DECLINED_CHUNKS + len(CLIENT_DECLINES)
DEVICES = SPARSE + HOST_SPARSE_COUNTS
COUNTS = SPARSE + len(SPARSE_COUNTS)
_SPARSE_SINCE = 7
_DEVICES_SINCE = 8
_STORE_SINCE = 4
_STORE_PLACES = (HIT_CHUNKS + Level.STORE, LOADED_CHUNKS + Level.STORE)
_COUNTS_BEFORE_STORE = SPARSE - len(_STORE_PLACES)
_COUNT_BYTES = 8


def pack(counts: Sequence[int], version: int) -> bytes:
    """The column of `COUNTS` counts for a peer of this version."""
    assert len(counts) == COUNTS
    known = list(counts[: COUNTS if version >= _DEVICES_SINCE else DEVICES if version >= _SPARSE_SINCE else SPARSE])
    for place in reversed(_STORE_PLACES) if version < _STORE_SINCE else ():
        known[place - 1] += known.pop(place)
    return struct.pack(f"<{len(known)}Q", *known)


def unpack(column: bytes) -> UsageReport:
    """The report in a column. Raises ProtocolError unless it has exactly the length of some version."""
    number, rest = divmod(len(column), _COUNT_BYTES)
    if rest or number not in (_COUNTS_BEFORE_STORE, SPARSE, DEVICES, COUNTS):
        raise ProtocolError(f"usage column has {len(column)} bytes, expected {_COUNT_BYTES * COUNTS}")
    counts = struct.unpack(f"<{number}Q", column)
    for place in _STORE_PLACES if number == _COUNTS_BEFORE_STORE else ():
        counts = (*counts[:place], 0, *counts[place:])
    return UsageReport(
        lookups=counts[LOOKUPS],
        lookup_chunks=counts[LOOKUP_CHUNKS],
        loads=counts[LOADS],
        hit_chunks=counts[HIT_CHUNKS:LOADED_CHUNKS],
        loaded_chunks=counts[LOADED_CHUNKS:FAILED_LOADS],
        failed_loads=counts[FAILED_LOADS:DECLINED_CHUNKS],
        declined_chunks=counts[DECLINED_CHUNKS:SPARSE],
        sparse=SparseUsage(*counts[SPARSE:]),
    )
