"""Versions of the local protocol: the one that a connection uses, and the fields that a peer of an earlier version gets.

A client's hello has the oldest and the newest version that it speaks, the welcome the one that the daemon has chosen: the
newest that both speak. Towards a peer of an earlier version a record is cut to the fields that it had. docs/protocol.md
defines what makes a new version: its records stand in `SINCE`, its fields, each with a default, in `FIELDS_UP_TO`. There is
one version; tests/golden/protocol_1.txt has its bytes. Pure functions; any thread.
"""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

import kvpool_native
from kvpool.errors import Refused
from kvpool.protocol.records import messages as m

OLDEST = 1
NEWEST = m.PROTOCOL_VERSION
# The version that a kind of frame came with, where it was not the first.
SINCE: dict[type[Any], int] = {}
# How many fields a record had up to a version, the oldest first; later fields have defaults.
FIELDS_UP_TO: dict[type[Any], tuple[tuple[int, int], ...]] = {}

Record = TypeVar("Record")


def greetings() -> list[int]:
    """The versions as whose client to greet a daemon, the next one where it takes the hello for a bad frame: the newest, then
    the last ones whose hello had fewer fields."""
    return [NEWEST, *(last for last, _ in reversed(FIELDS_UP_TO.get(m.Hello, ())))]


def choose(oldest: int, newest: int) -> int:
    """The version for a peer that speaks these. Raises Refused where there is none."""
    chosen = min(newest, NEWEST)
    if chosen < max(oldest, OLDEST):
        older = "client (install this daemon's kvpool where the engine runs)" if newest < OLDEST else "daemon"
        spoken = f"client speaks protocol {oldest} to {newest}, this daemon {OLDEST} to {NEWEST}"
        raise Refused("version", f"{spoken}: update the {older}")
    return chosen


def encode_for(record: Any, sequence: int, version: int) -> bytes:
    """The frame that carries `record` to a peer of this version."""
    if version >= NEWEST:
        return m.encode(record, sequence)
    return kvpool_native.encode_record(record.KIND, sequence, record, names_for(type(record), version))


def names_for(record: type[Any], version: int) -> tuple[str, ...]:
    """The fields of a record that a peer of an earlier version gets."""
    assert version >= SINCE.get(record, OLDEST), f"{record.__name__} is sent to a peer of version {version}"
    names: tuple[str, ...] = record.__slots__
    return names[: fields_of(record, version)]


def fields_of(record: type[Any], version: int) -> int | None:
    """How many fields a record has in a version; None: all of them."""
    return next((count for last, count in FIELDS_UP_TO.get(record, ()) if version <= last), None)


def decode_of_any(record: type[Record], values: list[object]) -> Record:
    """The record of a peer whose version is not known yet: fields that came later have their defaults. Raises ProtocolError."""
    if any(len(values) == count for _, count in FIELDS_UP_TO.get(record, ())):
        later = fields(record)[len(values) :]  # type: ignore[arg-type]
        assert all(field.default is not MISSING for field in later)
        values = [*values, *(field.default for field in later)]
    return m.decode_as(record, values)
