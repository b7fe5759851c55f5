"""Usage report as a column: u64 little endian, in the order below.

    lookups, chunks looked up, loads,
    chunks hit by level, chunks loaded by level, failed loads by `LoadReason`, declined chunks as `CLIENT_DECLINES`,
    compute by lookup as `SPARSE_COUNTS`

Every report has the same length. Pure functions; any thread.
"""

import struct
from collections.abc import Sequence

from kvpool.errors import ProtocolError
from kvpool.states import CLIENT_DECLINES, LEVELS, LoadReason
from kvpool.usage import SPARSE_COUNTS, SparseUsage, UsageReport

LOOKUPS, LOOKUP_CHUNKS, LOADS = range(3)
HIT_CHUNKS = 3
LOADED_CHUNKS = HIT_CHUNKS + LEVELS
FAILED_LOADS = LOADED_CHUNKS + LEVELS
DECLINED_CHUNKS = FAILED_LOADS + len(LoadReason)
SPARSE = DECLINED_CHUNKS + len(CLIENT_DECLINES)
COUNTS = SPARSE + len(SPARSE_COUNTS)
_COLUMN = struct.Struct(f"<{COUNTS}Q")


def pack(counts: Sequence[int]) -> bytes:
    """The column of `COUNTS` counts."""
    return _COLUMN.pack(*counts)


def unpack(column: bytes) -> UsageReport:
    """The report in a column. Raises ProtocolError unless it has exactly its length."""
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
        declined_chunks=counts[DECLINED_CHUNKS:SPARSE],
        sparse=SparseUsage(*counts[SPARSE:]),
    )
