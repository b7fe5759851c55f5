"""Columns: checks of the columns in requests. Each raises ProtocolError for an invalid one, before anything is decoded.

Pure functions; any thread.
"""

import struct
from collections.abc import Sequence

from kvpool.errors import ProtocolError
from kvpool.ids import DURATION_BYTES, PROOF_BYTES
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.packed_numbers import u32_of
from kvpool.protocol.records import messages as m
from kvpool.states import KEEP_PRIORITY, PRIORITY_MAX

NUMBER_BYTES = 8
COUNT_BYTES = 4
_KEEP = bytes([KEEP_PRIORITY])
_ENDED = struct.Struct(f"<I{PROOF_BYTES}s")


def keys_of(packed: bytes, *, ranks: int = 1, keys_max: int = m.KEYS_MAX) -> KeyColumn:
    """The keys of a request. Raises ProtocolError unless they are whole, as many for each of `ranks`, within `keys_max`."""
    size = packed_bytes(ranks)
    count, rest = divmod(len(packed), size)
    if rest or not 0 < count * ranks <= keys_max:
        raise ProtocolError(
            f"keys column has {len(packed)} bytes, expected a multiple of {size} for at most {keys_max} keys"
        )
    return KeyColumn(packed)


def keys_of_groups(packed: bytes, counts: Sequence[int], *, ranks: int) -> list[KeyColumn]:
    """The keys of each group: so many of each, on each of `ranks`. Raises ProtocolError."""
    wanted = ranks * sum(counts)
    if not 0 < wanted <= m.KEYS_MAX or len(packed) != packed_bytes(wanted):
        raise ProtocolError(
            f"keys column has {len(packed)} bytes, expected {packed_bytes(wanted)}, for at most {m.KEYS_MAX} keys"
        )
    keys, found = KeyColumn(packed), []
    for count in counts:
        found.append(keys[: ranks * count])
        keys = keys[ranks * count :]
    return found


def keys_of_each(counts: bytes, packed: bytes, *, namespaces: int, keys_max: int) -> list[KeyColumn]:
    """The keys of each namespace: so many of each, `keys_max` at most, from a column of u32. Raises ProtocolError."""
    if len(counts) != namespaces * COUNT_BYTES:
        raise ProtocolError(f"counts column has {len(counts)} bytes, expected {namespaces * COUNT_BYTES}")
    numbers = u32_of(counts).tolist()
    wanted = sum(numbers)
    if not 0 < wanted <= keys_max or len(packed) != packed_bytes(wanted):
        raise ProtocolError(f"keys column has {len(packed)} bytes for {wanted} keys, expected 1..{keys_max} keys")
    keys, found = KeyColumn(packed), []
    for number in numbers:
        found.append(keys[:number])
        keys = keys[number:]
    return found


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """A column of u64."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(column: bytes, name: str) -> list[int]:
    """The numbers of a column of u64, which errors call `name`. Raises ProtocolError unless it is one, RENEWALS_MAX at most."""
    if len(column) % NUMBER_BYTES or len(column) > NUMBER_BYTES * m.RENEWALS_MAX:
        raise ProtocolError(f"{name} column has {len(column)} bytes, expected 8 each for at most {m.RENEWALS_MAX}")
    return list(struct.unpack(f"<{len(column) // NUMBER_BYTES}Q", column))


def pack_ended(connection: int, proof: bytes) -> bytes:
    """One connection of a hello's column of those that have ended: its number and the proof of its welcome."""
    return _ENDED.pack(connection, proof)


def unpack_ended(column: bytes) -> list[tuple[int, bytes]]:
    """As `pack_ended`, of all of them. Raises ProtocolError."""
    if len(column) % _ENDED.size or len(column) > m.ENDED_MAX * _ENDED.size:
        raise ProtocolError(
            f"ended column has {len(column)} bytes, expected a multiple of {_ENDED.size}, at most {m.ENDED_MAX * _ENDED.size}"
        )
    return list(_ENDED.iter_unpack(column))


def check_retention_columns(chunks: int, *, ranks: int) -> None:
    """Raises ProtocolError unless a request about this many chunks on each of `ranks` is within RETAIN_KEYS_MAX."""
    if not 0 < chunks * ranks <= m.RETAIN_KEYS_MAX:
        raise ProtocolError(f"{chunks} chunks are named, expected 1..{m.RETAIN_KEYS_MAX // ranks}")


def check_retention(priorities: bytes, durations: bytes, count: int) -> None:
    """Raises ProtocolError unless both columns have `count` entries and every priority is one."""
    if len(priorities) != count or len(durations) != DURATION_BYTES * count:
        raise ProtocolError(f"retention has columns of {len(priorities)} and {len(durations)} bytes for {count} keys")
    worst = max(priorities.replace(_KEEP, b""), default=0)
    if worst > PRIORITY_MAX:
        raise ProtocolError(f"priority is {worst}, expected 0..{PRIORITY_MAX}")
