"""What a connection may ask about chunks that come and go: events, snapshots, fates, the names of namespaces.

An engine hears of its own namespaces alone and never waits; an operator hears of all and may wait for the next event. The
handlers hold no state of their own. Control thread only.
"""

import math
from collections.abc import Awaitable, Collection
from functools import partial

from kvpool.errors import ProtocolError
from kvpool.index.journal import Journal
from kvpool.index.namespaces import Namespaces
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.protocol import event_columns
from kvpool.protocol import messages as m
from kvpool.server.connection import Answer, Handler
from kvpool.types import EPOCH_BYTES, KEY_BYTES, NamespaceId

WAIT_S_MAX = 30.0
NAMESPACES_BYTES_MAX = 512 << 10
# Fields of a namespace besides its model's name.
_NAMESPACE_BYTES = 400


def engine_event_handlers(journal: Journal, namespaces: Namespaces, session: EngineSession) -> dict[type, Handler]:
    """The requests of an engine."""
    own = frozenset(session.namespace_ids)
    return {
        m.AskEvents: partial(_events_at_once, journal, namespaces, own),
        m.AskSnapshot: partial(_snapshot, journal, namespaces, own),
    }


def admin_event_handlers(journal: Journal, namespaces: Namespaces) -> dict[type, Handler]:
    """The requests of an operator."""
    return {
        m.AskEvents: partial(_events_or_wait, journal, namespaces),
        m.AskSnapshot: partial(_snapshot, journal, namespaces, None),
        m.AskFates: partial(_fates, journal),
        m.AskNamespaces: partial(_list_namespaces, namespaces),
    }


def _events_at_once(
    journal: Journal, namespaces: Namespaces, own: Collection[int] | None, request: m.AskEvents
) -> Answer:
    if len(request.incarnation) not in (0, EPOCH_BYTES):
        raise ProtocolError(f"incarnation has {len(request.incarnation)} bytes, expected none or {EPOCH_BYTES}")
    found = journal.since(request.incarnation, request.last)
    events = [event for event in found.events if own is None or event.namespace < 0 or event.namespace in own]
    return m.Events(
        journal.incarnation,
        found.last,
        found.is_gap,
        event_columns.pack_events(events),
        _names(namespaces, {event.namespace for event in events}),
    )


def _events_or_wait(journal: Journal, namespaces: Namespaces, request: m.AskEvents) -> Answer | Awaitable[Answer]:
    if math.isnan(request.wait_s) or not 0.0 <= request.wait_s <= WAIT_S_MAX:
        return m.Failure("argument", f"wait_s is {request.wait_s}, expected 0 to {WAIT_S_MAX:g}")
    answer = _events_at_once(journal, namespaces, None, request)
    assert isinstance(answer, m.Events)
    if not request.wait_s or answer.is_gap or answer.last > request.last:
        return answer
    return _events_later(journal, namespaces, request)


async def _events_later(journal: Journal, namespaces: Namespaces, request: m.AskEvents) -> Answer:
    await journal.wait_for_events(request.last, request.wait_s)
    return _events_at_once(journal, namespaces, None, request)


def _snapshot(journal: Journal, namespaces: Namespaces, own: Collection[int] | None, request: m.AskSnapshot) -> Answer:
    page = journal.snapshot(request.cursor)
    chunks = [chunk for chunk in page.chunks if own is None or chunk.namespace in own]
    return m.SnapshotPage(
        journal.incarnation,
        page.as_of,
        page.cursor,
        event_columns.pack_chunks(chunks),
        _names(namespaces, {chunk.namespace for chunk in chunks}),
    )


def _fates(journal: Journal, request: m.AskFates) -> Answer:
    count, rest = divmod(len(request.keys), KEY_BYTES)
    if rest or not 0 < count <= m.FATES_MAX:
        raise ProtocolError(
            f"keys column has {len(request.keys)} bytes, expected 32 for each of 1 to {m.FATES_MAX} keys"
        )
    keys = [request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)]
    return m.Report({"fates": [{"key": key.hex(), **journal.explain(key)} for key in keys]})


def _list_namespaces(namespaces: Namespaces, request: m.AskNamespaces) -> Answer:
    names: dict[int, tuple[str, Layout]] = {}
    size = 0
    for namespace in namespaces.all():
        size += len(namespace.model.encode()) + _NAMESPACE_BYTES
        if namespace.id >= request.first:
            names[namespace.id] = (namespace.model, namespace.layout)
        else:
            size = 0
        if size > NAMESPACES_BYTES_MAX:
            break
    return m.NamespaceList(event_columns.pack_namespaces(names))


def _names(namespaces: Namespaces, numbers: Collection[int]) -> bytes:
    found = [namespaces.by_id(NamespaceId(number)) for number in sorted(numbers) if number >= 0]
    return event_columns.pack_namespaces({one.id: (one.model, one.layout) for one in found})
