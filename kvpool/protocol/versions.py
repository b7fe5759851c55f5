"""Versions of the local protocol: the one that a connection uses, and the fields that a peer of an earlier version gets.

A client's hello has the oldest and the newest version that it speaks, the welcome the one that the daemon has chosen: the
newest that both speak. Towards a peer of an earlier version a record is cut to the fields that it had. An engine's client reads
the daemon's shared memory too, whose layout changes with the version: one of another version is refused with the remedy;
operators of every version are served. docs/protocol.md defines what makes a new version. Pure functions; any thread.

    1  as recorded in tests/golden/protocol_1.txt
    2  a range in Hello, the choice in Welcome; DropLease, DropLeases and DropReservation; Batch; AskConnections, Disconnect,
       LogLevel and Reload; whether DemoteAll respects the write budget
    3  slots in Leased: the shared index has its words by slot. Engines speak no earlier one
"""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvpool.errors import Refused
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import connections as cm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import operator as om

OLDEST = 1
OLDEST_OF_ENGINES = 3
NEWEST = m.PROTOCOL_VERSION
# The version that a kind of frame came with, where it was not the first.
SINCE: dict[type[Any], int] = {
    one_way.DropLease: 2,
    one_way.DropLeases: 2,
    one_way.DropReservation: 2,
    bm.Batch: 2,
    bm.Batched: 2,
    cm.AskConnections: 2,
    cm.Disconnect: 2,
    om.LogLevel: 2,
    om.Reload: 2,
}
# How many fields a record had up to a version; later fields have defaults.
FIELDS_UP_TO: dict[type[Any], tuple[int, int]] = {
    m.Hello: (1, 5),
    m.Welcome: (1, 10),
    m.DemoteAll: (1, 1),
    m.Leased: (2, 5),
}

Record = TypeVar("Record")


def oldest_of(role: str) -> int:
    """The oldest version that a client of this role can speak."""
    return OLDEST if role == m.ROLE_ADMIN else OLDEST_OF_ENGINES


def choose(oldest: int, newest: int, role: str) -> int:
    """The version for a peer that speaks these. Raises Refused where there is none."""
    chosen, least = min(newest, NEWEST), oldest_of(role)
    if chosen < max(oldest, least):
        older = "client (install this daemon's kvpool where the engine runs)" if newest < least else "daemon"
        spoken = f"client speaks protocol {oldest} to {newest}, this daemon {least} to {NEWEST}"
        raise Refused("version", f"{spoken}: update the {older}")
    return chosen


def encode_for(record: object, sequence: int, version: int) -> bytes:
    """The frame that carries `record` to a peer of this version."""
    if version >= NEWEST:
        return m.encode(record, sequence)
    if version < SINCE.get(type(record), OLDEST):
        raise AssertionError(f"{type(record).__name__} is sent to a peer of version {version}")
    last, count = FIELDS_UP_TO.get(type(record), (0, 0))
    values = m.values_of(record)
    return frames.encode(record.KIND, sequence, values[:count] if version <= last else values)  # type: ignore[attr-defined]


def decode_from(record: type[Record], values: list[object], version: int) -> Record:
    """The record of a peer of this version. Raises ProtocolError."""
    last, _ = FIELDS_UP_TO.get(record, (0, 0))
    return decode_of_any(record, values) if version <= last else m.decode_as(record, values)


def decode_of_any(record: type[Record], values: list[object]) -> Record:
    """The record of a peer whose version is not known yet: fields that came later have their defaults. Raises ProtocolError."""
    if len(values) == FIELDS_UP_TO[record][1]:
        values = [*values, *(field.default for field in fields(record) if field.default is not MISSING)]  # type: ignore[arg-type]
    return m.decode_as(record, values)
