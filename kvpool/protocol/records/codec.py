"""Codec between records and frames: a record's fields are its wire fields in order, each of one fixed type.

Works on any dataclass with slots and a KIND. Any thread.
"""

from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import kvpool_native
from kvpool.errors import ProtocolError

Record = TypeVar("Record")
_TYPES: dict[type[Any], tuple[type[Any], ...]] = {}


def encode(record: Any, sequence: int) -> bytes:
    """The frame that carries `record`."""
    return kvpool_native.encode_record(record.KIND, sequence, record, record.__slots__)


def decode_as(record: type[Record], values: list[object]) -> Record:
    """The record in a frame's fields. Raises ProtocolError unless number and types are exactly its own."""
    types = _TYPES.get(record)
    if types is None:
        types = _TYPES[record] = field_types(record)
    if tuple(map(type, values)) != types:
        raise _misfit(record, values, types)
    return record(*values)


def _misfit(record: type[Any], values: list[object], types: tuple[type[Any], ...]) -> ProtocolError:
    if len(values) != len(types):
        return ProtocolError(f"{record.__name__} has {len(values)} fields, expected {len(types)}")
    found, expected = next(
        (type(value), kind) for value, kind in zip(values, types, strict=True) if type(value) is not kind
    )
    return ProtocolError(f"{record.__name__} has a field of {found.__name__}, expected {expected.__name__}")


def field_types(record: type[Any]) -> tuple[type[Any], ...]:
    """The type that each field has on the wire."""
    hints = get_type_hints(record)
    return tuple(getattr(hints[field.name], "__origin__", hints[field.name]) for field in fields(record))
