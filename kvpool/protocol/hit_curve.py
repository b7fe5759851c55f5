"""Capacities in `AskHitCurve`: a column of u64 bytes, CAPACITIES_MAX at most. Any thread."""

from collections.abc import Sequence

import numpy as np

from kvpool.errors import ProtocolError

CAPACITIES_MAX = 1024
_WORD = np.dtype("<u8")


def pack(capacities: Sequence[int]) -> bytes:
    """The column of capacities."""
    return np.array(capacities, _WORD).tobytes()


def unpack(column: bytes) -> list[int]:
    """The capacities of a column. Raises ProtocolError."""
    if len(column) % _WORD.itemsize or len(column) > CAPACITIES_MAX * _WORD.itemsize:
        raise ProtocolError(f"capacities column has {len(column)} bytes, expected 8 each for at most {CAPACITIES_MAX}")
    capacities: list[int] = np.frombuffer(column, _WORD).tolist()
    return capacities
