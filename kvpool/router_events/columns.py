"""Columns of events, stored chunks and namespaces: msgpack inside one bin field of a frame.

So they count as one item of the frame, however many they are; the sender keeps them under the frame's limit. Pure functions;
any thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from kvpool.errors import LayoutMismatch, ProtocolError
from kvpool.events import Cause, Event, EventKind, StoredChunk
from kvpool.layout import Layout

# A namespace as an event names it: the model, and the layout of one rank.
NamespaceNames = dict[int, tuple[str, Layout]]
_KINDS = frozenset(map(int, EventKind))
_CAUSES = {int(cause): cause for cause in Cause}


def pack_events(events: Iterable[Event]) -> bytes:
    """The column of events."""
    return _pack(list(events))


def unpack_events(column: bytes) -> tuple[Event, ...]:
    """The events of a column but for kinds that only a later version knows: their ids are missing. Raises ProtocolError."""
    try:
        return tuple(_event_of(*fields) for fields in _unpack(column) if fields[1] in _KINDS)
    except (TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"column of events has an entry that is none: {error}") from error


def pack_chunks(chunks: Iterable[StoredChunk]) -> bytes:
    """The column of chunks."""
    return _pack(list(chunks))


def unpack_chunks(column: bytes) -> tuple[StoredChunk, ...]:
    """The chunks of a column. Raises ProtocolError."""
    try:
        return tuple(StoredChunk(*fields) for fields in _unpack(column))
    except TypeError as error:
        raise ProtocolError(f"column of chunks has an entry that is none: {error}") from error


def pack_namespaces(namespaces: Mapping[int, tuple[str, Layout]]) -> bytes:
    """The column of namespaces."""
    return _pack([[number, model, layout.to_wire()] for number, (model, layout) in namespaces.items()])


def unpack_namespaces(column: bytes) -> NamespaceNames:
    """The namespaces of a column, by number. Raises ProtocolError."""
    try:
        return {number: (model, Layout.from_wire(wire)) for number, model, wire in _unpack(column)}
    except (TypeError, ValueError, LayoutMismatch) as error:
        raise ProtocolError(f"column of namespaces has an entry that is none: {error}") from error


def _event_of(number: int, kind: int, *fields: Any) -> Event:
    namespace, keys, parent, tokens, *numbers, cause, capacities, adapter, salt_tag = fields
    tiers, tiers_before, priority, priority_before = numbers
    return Event(
        number,
        EventKind(kind),
        namespace=namespace,
        keys=keys,
        parent=parent,
        tokens=tokens,
        tiers=tiers,
        tiers_before=tiers_before,
        priority=priority,
        priority_before=priority_before,
        cause=_CAUSES.get(cause, Cause.OTHER),
        capacities=tuple(capacities),
        adapter=adapter,
        salt_tag=salt_tag,
    )


def _pack(rows: Sequence[object]) -> bytes:
    column: bytes = msgpack.packb(rows, use_bin_type=True)
    return column


def _unpack(column: bytes) -> list[Any]:
    try:
        rows = msgpack.unpackb(column, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"column of {len(column)} bytes is not msgpack of this protocol: {error}") from error
    if not isinstance(rows, list):
        raise ProtocolError("column is no array")
    return rows
