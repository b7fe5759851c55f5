"""Capacities in `AskHitCurve`: a column of u64 bytes, CAPACITIES_MAX at most. Any thread."""

from collections.abc import Sequence

from kvpool.errors import ProtocolError
from kvpool.packed_numbers import U64_BYTES, pack_u64, u64_of

CAPACITIES_MAX = 1024


def pack(capacities: Sequence[int]) -> bytes:
    """The column of capacities."""
    return pack_u64(capacities)


def unpack(column: bytes) -> list[int]:
    """The capacities of a column. Raises ProtocolError."""
    if len(column) % U64_BYTES or len(column) > CAPACITIES_MAX * U64_BYTES:
        raise ProtocolError(f"capacities column has {len(column)} bytes, expected 8 each for at most {CAPACITIES_MAX}")
    return u64_of(column).tolist()
