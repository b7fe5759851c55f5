"""Checks of the columns that requests carry, beside those that their records make. Each raises ProtocolError. Any thread."""

import numpy as np

from kvpool.errors import ProtocolError
from kvpool.protocol.messages import KEYS_MAX, RENEWALS_MAX
from kvpool.types import KEY_BYTES

LEASE_BYTES = 8


def check_leaves(leaves: bytes, chunks: int, *, ranks: int) -> None:
    """`leaves` is a key for each rank, of prefixes of `chunks` chunks."""
    if len(leaves) != ranks * KEY_BYTES:
        raise ProtocolError(f"leaves column has {len(leaves)} bytes, expected {ranks * KEY_BYTES}")
    if not 0 < chunks * ranks <= KEYS_MAX:
        raise ProtocolError(f"chunks is {chunks}, expected 1..{KEYS_MAX // ranks}")


def check_parent(parent: bytes) -> None:
    """`parent` is a key, or empty: the root."""
    if len(parent) not in (0, KEY_BYTES):
        raise ProtocolError(f"parent key has {len(parent)} bytes, expected none or {KEY_BYTES}")


def unpack_leases(column: bytes) -> list[int]:
    """The leases of a column."""
    if len(column) % LEASE_BYTES or len(column) > LEASE_BYTES * RENEWALS_MAX:
        raise ProtocolError(f"leases column has {len(column)} bytes, expected 8 each for at most {RENEWALS_MAX}")
    leases: list[int] = np.frombuffer(column, dtype="<u8").tolist()
    return leases
