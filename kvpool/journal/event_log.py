"""Event log: what happened to chunks, in order, for subscribers; bounded, the oldest dropped first.

Dropped events are a gap in the ids; a reader that gets one has to take a snapshot. A run of changes is one event; the native
module joins changes to runs (`native/directory/change_runs.h`).

Not here: where changes come from (`journal`), how events look to others (`router_events`).
The control thread writes it; any thread reads it, under the log's lock. No clock is read.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import kvpool_native
from kvpool.events import Cause, Event, EventKind
from kvpool.keys import Scope, split_scope

# What an event and its entry in the log take besides keys and tokens (measured: 390 bytes).
EVENT_BYTES = 400
# Runs are not joined beyond this, so that any event fits a frame and a message.
EVENT_PAYLOAD_BYTES_MAX = 64 << 10
NO_SCOPE = Scope()
CAUSES = tuple(cause for cause in Cause if cause is not Cause.OTHER)  # by their codes
assert all(cause == code for code, cause in enumerate(CAUSES))
_KINDS = tuple(EventKind)
assert all(kind == code for code, kind in enumerate(_KINDS))


class ChangeKind:
    """The native module's codes for kinds of changes."""

    ARRIVED = 0
    LEFT = 1
    PRIORITY = 2


class Change(NamedTuple):
    """A row of the native feed, field by field of `CHANGE_ROW`.

    `parent` of the first chunk of a prompt is zeros; `record` is where native code looks for token ids first; `tiers` are those
    after the change.
    """

    key: bytes
    parent: bytes
    namespace: int
    record: int
    kind: int
    level: int
    tiers: int
    cause: int
    priority: int
    priority_before: int


def event_of_run(run: kvpool_native.ChangeRun, number: int) -> Event:
    """The changes of a run as an event with its number."""
    scope = run.scope
    return Event(
        number,
        _KINDS[run.kind],
        run.namespace,
        run.keys,
        run.parent,
        run.tokens,
        run.tiers,
        run.tiers_before,
        run.priority,
        run.priority_before,
        CAUSES[run.cause],
        (),
        *(split_scope(scope, 0)[1] if scope else NO_SCOPE),
    )


@dataclass(frozen=True, slots=True)
class EventSlice:
    """Some events in a row. `last`: where to continue; `oldest`: the first id in the log; `has_more`: later ones are there.

    After a gap there are none: a snapshot has to be taken.
    """

    events: tuple[Event, ...]
    last: int
    oldest: int
    is_gap: bool
    has_more: bool = False

    def events_until(self, last: int) -> "EventSlice":
        """The same up to an id: later events must not be applied before a snapshot page that does not include them."""
        kept = tuple(event for event in self.events if event.id <= last)
        return replace(self, events=kept, last=min(self.last, last))


class EventLog:
    """The latest events, by id.

    Invariant: `_events` holds exactly the ids `oldest` up to `next_id`, each with what it takes, and `_bytes` is their sum, at
    most `bytes_max` unless there is a single one.

    `lock` guards both: whoever holds it sees no event come and no gap open. Never held across a wait.
    """

    def __init__(self, bytes_max: int, capacities: Sequence[int]) -> None:
        self.lock = threading.RLock()
        self._bytes_max = bytes_max
        self._events: dict[int, tuple[Event, int]] = {}
        self.oldest = 0
        self._bytes = 0
        self.next_id = 0
        self.dropped_events = 0
        self.gaps = 0
        self.append(Event(0, EventKind.CREATED, capacities=tuple(capacities)))

    def __repr__(self) -> str:
        return f"<EventLog {self.oldest}..{self.next_id - 1}, {self._bytes} bytes>"

    @property
    def events(self) -> int:
        """Events that can be read."""
        return len(self._events)

    @property
    def used_bytes(self) -> int:
        """Bytes that the events take."""
        return self._bytes

    def append(self, event: Event) -> None:
        """Append the next event; the oldest ones are dropped to make room."""
        assert event.id == self.next_id
        size = _size_of(event)
        with self.lock:
            self._events[self.next_id] = event, size
            self.next_id += 1
            self._bytes += size
            while self._bytes > self._bytes_max and len(self._events) > 1:
                self._bytes -= self._events.pop(self.oldest)[1]
                self.oldest += 1
                self.dropped_events += 1

    def open_gap(self) -> None:
        """Open a gap: something happened without an event, and no reader can continue from before it."""
        with self.lock:
            self.dropped_events += len(self._events)
            self.gaps += 1
            self._events.clear()
            self._bytes = 0
            self.next_id += 1
            self.oldest = self.next_id

    def since(self, last: int, bytes_max: int) -> EventSlice:
        """The events after id `last` (-1: from the first), as many as fit, at least one where there is any. Any thread."""
        with self.lock:
            if not self.oldest - 1 <= last < self.next_id:
                return EventSlice((), self.next_id - 1, self.oldest, is_gap=True)
            chosen: list[Event] = []
            size, at = 0, last + 1
            while at < self.next_id:
                event, event_bytes = self._events[at]
                size += event_bytes
                if chosen and size > bytes_max:
                    break
                chosen.append(event)
                at += 1
            return EventSlice(tuple(chosen), at - 1, self.oldest, is_gap=False, has_more=at < self.next_id)

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = []
        if list(self._events) != list(range(self.oldest, self.next_id)):
            problems.append(f"events: the log does not hold exactly {self.oldest} to {self.next_id}")
        if self._bytes != sum(_size_of(event) for event, _ in self._events.values()):
            problems.append("events: the log miscounts its bytes")
        if self._bytes > self._bytes_max and len(self._events) > 1:
            problems.append(f"events: the log takes {self._bytes} bytes, {self._bytes_max} are allowed")
        return problems


def _size_of(event: Event) -> int:
    return EVENT_BYTES + len(event.keys) + len(event.tokens) + len(event.adapter)
