"""Handlers of requests about chunks that come and go: events, snapshots, histories, the names of namespaces.

An engine gets events of its own namespaces alone and never waits; an operator gets all and may wait for the next event. The
handlers hold no state of their own. Control thread only.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

from kvpool.errors import ProtocolError
from kvpool.events import Event
from kvpool.ids import EPOCH_BYTES, NamespaceId
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.journal.snapshot_page import SnapshotPage
from kvpool.layout import Layout
from kvpool.pool.pool import Pool
from kvpool.protocol import columns
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.protocol.verbs import EVERYBODY, OPERATOR, verb
from kvpool.router_events import columns as event_columns
from kvpool.server.connections.connection import Answer
from kvpool.server.events.source import HEADERS_TIMEOUT_S

WAIT_S_MAX = 30.0
# With `journal.ANSWER_BYTES_MAX` of events they fit a frame.
NAMESPACES_BYTES_MAX = 512 << 10
# Fields of a namespace besides its model's name.
_NAMESPACE_BYTES = 400


class EventVerbs:
    """The requests of an engine, which hears of its own namespaces alone, or (`session` None) of an operator."""

    def __init__(self, pool: Pool, session: EngineSession | None) -> None:
        self._pool = pool
        self._session = session

    @verb(em.AskEvents, roles=EVERYBODY)
    def events(self, request: em.AskEvents) -> Answer | Awaitable[Answer]:
        """Events behind an id; an operator may wait for the next one."""
        if self._session is None:
            return _events_or_wait(self._pool, request)
        return _events_at_once(self._pool, self._session, request)

    @verb(em.AskSnapshot, roles=EVERYBODY)
    def snapshot(self, request: em.AskSnapshot) -> em.SnapshotPage | Awaitable[em.SnapshotPage]:
        """A page of what is stored."""
        page = self._pool.journal.snapshot(request.cursor)
        if page.words is None:
            return _page(self._pool, self._session, page)
        return _page_later(self._pool, self._session, page, page.words)

    @verb(em.AskChunkHistory, roles=OPERATOR)
    def chunk_history(self, request: em.AskChunkHistory) -> Parts[m.Report]:
        """The history of some chunks, one in a turn: each is looked for among all that is remembered."""
        chunks: list[dict[str, Any]] = []
        for key in columns.keys_of(request.keys, keys_max=em.HISTORY_KEYS_MAX):
            if chunks:
                yield None
            chunks.append({"key": key.hex(), **self._pool.journal.explain(key)})
        return m.Report({"chunks": chunks})

    @verb(em.AskNamespaces, roles=OPERATOR)
    def namespaces(self, request: em.AskNamespaces) -> Answer:
        """Names of namespaces, as many as fit an answer."""
        return _list_namespaces(self._pool, request)


def _events_at_once(pool: Pool, session: EngineSession | None, request: em.AskEvents) -> em.Events:
    if len(request.incarnation) not in (0, EPOCH_BYTES):
        raise ProtocolError(f"incarnation has {len(request.incarnation)} bytes, expected none or {EPOCH_BYTES}")
    found = pool.journal.since(request.incarnation, request.last)
    own = None if session is None else session.namespace_ids
    events = [event for event in found.events if own is None or event.namespace < 0 or event.namespace in own]
    chosen = events[: _nameable(pool, events)]
    return em.Events(
        pool.journal.incarnation,
        found.last if len(chosen) == len(events) else chosen[-1].id,
        found.oldest,
        found.is_gap,
        event_columns.pack_events(chosen),
        _names(pool, {event.namespace for event in chosen}),
    )


def _nameable(pool: Pool, events: Sequence[Event]) -> int:
    """How many events, from the first on, name few enough namespaces for one answer; at least one where there is any."""
    named: set[int] = set()
    size = 0
    for count, event in enumerate(events):
        if event.namespace < 0 or event.namespace in named:
            continue
        named.add(event.namespace)
        size += _name_bytes(pool.namespaces.by_id(NamespaceId(event.namespace)))
        if size > NAMESPACES_BYTES_MAX and count:
            return count
    return len(events)


def _events_or_wait(pool: Pool, request: em.AskEvents) -> Answer | Awaitable[Answer]:
    if math.isnan(request.wait_s) or not 0.0 <= request.wait_s <= WAIT_S_MAX:
        return m.Failure("argument", f"wait_s is {request.wait_s}, expected 0 to {WAIT_S_MAX:g}")
    answer = _events_at_once(pool, None, request)
    if not request.wait_s or answer.is_gap or answer.last > request.last:
        return answer
    return _events_later(pool, request)


async def _events_later(pool: Pool, request: em.AskEvents) -> Answer:
    await pool.journal.wait_for_events(request.last, request.wait_s)
    return _events_at_once(pool, None, request)


async def _page_later(
    pool: Pool, session: EngineSession | None, page: SnapshotPage, reading: "Future[list[bytes]]"
) -> em.SnapshotPage:
    """The page with the token ids that are read from disk in time; without them where they are late."""
    with contextlib.suppress(asyncio.TimeoutError):  # the page marks the ids as unknown
        words = await asyncio.wait_for(asyncio.wrap_future(reading), HEADERS_TIMEOUT_S)
        page = page.with_words(words, pool.journal.chunk_tokens)
    return _page(pool, session, page)


def _page(pool: Pool, session: EngineSession | None, page: SnapshotPage) -> em.SnapshotPage:
    own = None if session is None else session.namespace_ids
    chunks = [chunk for chunk in page.chunks if own is None or chunk.namespace in own]
    return em.SnapshotPage(
        pool.journal.incarnation,
        page.as_of,
        page.cursor,
        event_columns.pack_chunks(chunks),
        _names(pool, {chunk.namespace for chunk in chunks}),
    )


def _list_namespaces(pool: Pool, request: em.AskNamespaces) -> Answer:
    names: dict[int, tuple[str, Layout]] = {}
    size = 0
    for namespace in sorted(pool.namespaces.all(), key=attrgetter("id")):
        if namespace.id >= request.first and size < NAMESPACES_BYTES_MAX:
            names[namespace.id] = (namespace.model, namespace.layout)
            size += _name_bytes(namespace)
    return em.NamespaceList(event_columns.pack_namespaces(names))


def _name_bytes(namespace: Namespace) -> int:
    return len(namespace.model.encode()) + _NAMESPACE_BYTES


def _names(pool: Pool, numbers: Collection[int]) -> bytes:
    found = [pool.namespaces.by_id(NamespaceId(number)) for number in sorted(numbers) if number >= 0]
    return event_columns.pack_namespaces({one.id: (one.model, one.layout) for one in found})
