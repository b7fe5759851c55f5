"""Events of a Pool's chunks, as the daemon reports them: those since a mark, and a snapshot of what is stored now.

Records, and a function that requests each; the Pool passes the session. Nothing raises because of the daemon: while it is away
there is nothing new. Any thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.events import Event, StoredChunk
from kvpool.ids import EPOCH_BYTES
from kvpool.protocol.records import events as em
from kvpool.router_events.columns import NamespaceNames, unpack_chunks, unpack_events, unpack_namespaces
from kvpool.router_events.trtllm_format import trtllm_event
from kvpool_client.connection.session import Session

Failed = Callable[[Session, KVPoolError], None]


class EventMark(NamedTuple):
    """Position in the event log: the `last` event that was read, of the daemon process `incarnation`. `EventBatch.mark` is the
    next one; `BEGINNING` reads from the oldest event in the log."""

    incarnation: bytes
    last: int


BEGINNING = EventMark(b"", -1)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The `events` after a mark, in order, as `Pool.events` answers them; `mark` is where to continue.

    `is_gap`: earlier events have left the log, or the daemon was restarted. Then there are no events, and `Pool.snapshot` has
    what is stored now. `namespaces`: model and layout of the namespaces that the events name.
    """

    events: tuple[Event, ...]
    mark: EventMark
    is_gap: bool
    namespaces: NamespaceNames

    def until(self, mark: EventMark) -> "EventBatch":
        """The same events up to a mark: apply them before a part of a snapshot, and none that came after it."""
        events = tuple(event for event in self.events if event.id <= mark.last)
        reached = EventMark(self.mark.incarnation, min(self.mark.last, mark.last))
        return EventBatch(events, reached, self.is_gap, self.namespaces)

    def trtllm(self, block_tokens: int = 0) -> list[dict[str, Any]]:
        """The events in TensorRT-LLM's form, for JSON; chunks cut into blocks of `block_tokens` (0: whole)."""
        return [trtllm_event(event, self.namespaces, block_tokens) for event in self.events]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Some of the `chunks` that are stored at `mark`, as `Pool.snapshot` answers them.

    A reader that applies the events up to each part's mark (`EventBatch.until`), and then the part, has after the last part
    what is stored. `namespaces`: model and layout of the namespaces that the chunks name.
    """

    chunks: tuple[StoredChunk, ...]
    mark: EventMark
    namespaces: NamespaceNames


def read_events(session: Session | None, since: EventMark, on_failed: Failed) -> EventBatch:
    """See `Pool.events`."""
    is_mark = (
        isinstance(since, tuple)
        and len(since) == 2
        and isinstance(since[0], bytes)
        and len(since[0]) in (0, EPOCH_BYTES)
        and isinstance(since[1], int)
        and not isinstance(since[1], bool)
        and abs(since[1]) < 1 << 62
    )
    if not is_mark:
        raise InvalidArgument(f"since is {since!r}, expected the mark of an earlier answer")
    nothing_new = EventBatch((), EventMark(*since), is_gap=False, namespaces={})
    if session is None:
        return nothing_new
    try:
        answer = session.call(em.AskEvents(since[0], since[1], 0.0), em.Events)
        mark = EventMark(answer.incarnation, answer.last)
        return EventBatch(unpack_events(answer.events), mark, answer.is_gap, unpack_namespaces(answer.namespaces))
    except KVPoolError as error:
        on_failed(session, error)
        return nothing_new


def read_snapshot(session: Session | None, on_failed: Failed) -> Iterator[SnapshotPart]:
    """See `Pool.snapshot`."""
    cursor = 0
    while session is not None and cursor >= 0:
        try:
            answer = session.call(em.AskSnapshot(cursor), em.SnapshotPage)
            chunks, names = unpack_chunks(answer.chunks), unpack_namespaces(answer.namespaces)
        except KVPoolError as error:
            on_failed(session, error)
            raise
        yield SnapshotPart(chunks, EventMark(answer.incarnation, answer.as_of), names)
        cursor = answer.cursor
