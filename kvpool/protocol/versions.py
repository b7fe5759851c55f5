"""Versions of the local protocol: the one that a connection uses, and the values that a peer of an earlier version gets.

A client's hello has the oldest and the newest version that it speaks, the welcome the one that the daemon has chosen: the
newest that both speak. Towards a peer of an earlier version a record is cut to the fields that it had, and a value that the
peer does not know becomes one that it does. docs/protocol.md defines what makes a new version. Pure functions; any thread.

    1  as recorded in tests/golden/protocol_1.txt
    2  a range in Hello, the choice in Welcome; DropLease, DropLeases and DropReservation; Batch; AskConnections, Disconnect,
       LogLevel and Reload; whether DemoteAll respects the write budget
"""

from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from kvpool.errors import Refused
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import connections as cm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import operator as om
from kvpool.types import SaveState

OLDEST = 1
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
FIELDS_UP_TO: dict[type[Any], tuple[int, int]] = {m.Hello: (1, 5), m.Welcome: (1, 10), m.DemoteAll: (1, 1)}
# Replacement of a later state for clients up to a version: the nearest one that they know.
_STATES_UP_TO_1 = bytes.maketrans(
    bytes([SaveState.SHARE, SaveState.STOPPING]), bytes([SaveState.FULL, SaveState.NOT_READY])
)

Record = TypeVar("Record")


def choose(oldest: int, newest: int) -> int:
    """The version for a peer that speaks these. Raises Refused where there is none."""
    chosen = min(newest, NEWEST)
    if chosen < max(oldest, OLDEST):
        spoken = f"client speaks protocol {oldest} to {newest}, this daemon {OLDEST} to {NEWEST}"
        raise Refused("version", f"{spoken}: update the older of the two")
    return chosen


def encode_for(record: object, sequence: int, version: int) -> bytes:
    """The frame that carries `record` to a peer of this version."""
    if version >= NEWEST:
        return m.encode(record, sequence)
    if version < SINCE.get(type(record), OLDEST):
        raise AssertionError(f"{type(record).__name__} is sent to a peer of version {version}")
    if isinstance(record, (m.Reserved, m.Committed)):
        record = replace(record, states=record.states.translate(_STATES_UP_TO_1))
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
