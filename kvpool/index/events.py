"""The event log: what happened to chunks, in order, for whoever reads along; bounded, the oldest forgotten first.

`EventWriter` turns changes of tiers into events: chunks stored one behind the other become one event, and so do chunks
removed for one reason; nothing else is joined and nothing is moved, so that adding up events gives what the pool had.
`EventLog` keeps them. What was forgotten is seen as a gap in the ids; who meets one has to take a snapshot.

Not here: where changes come from (`journal`), how events look to others (`protocol.trtllm_events`, `server.event_frames`).
Control thread only; no clock is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.keys import Scope
from kvpool.types import KEY_BYTES, Cause, Event, EventKind

# What an event and its entry in the log take besides keys and tokens (measured: 390 bytes).
EVENT_BYTES = 400
# No event is joined beyond this, so that any event fits a frame and a message.
EVENT_PAYLOAD_BYTES_MAX = 64 << 10
_NO_KEY = bytes(KEY_BYTES)
NO_SCOPE = Scope()


class ChangeKind:
    """The native module's codes of what a change is."""

    ARRIVED = 0
    LEFT = 1
    PRIORITY = 2


class Change(NamedTuple):
    """A row of the native feed. `parent` of the first chunk of a prompt is zeros; `tiers` are those after the change."""

    key: bytes
    parent: bytes
    namespace: int
    kind: int
    level: int
    tiers: int
    cause: int
    priority: int
    priority_before: int


# What the changes of one event have in common besides namespace and kind: tiers, cause, priorities.
TRAITS = slice(5, 9)
assert list(Change._fields)[TRAITS] == ["tiers", "cause", "priority", "priority_before"]


@dataclass(frozen=True, slots=True)
class EventSlice:
    """Some events in a row. `last`: the id to go on from; `oldest`: the first id that is kept.

    Behind a gap there are none: a snapshot has to be taken.
    """

    events: tuple[Event, ...]
    last: int
    oldest: int
    is_gap: bool

    def events_until(self, last: int) -> "EventSlice":
        """The same up to an id: what came later must not be applied before a snapshot page that does not know of it."""
        kept = tuple(event for event in self.events if event.id <= last)
        return EventSlice(kept, min(self.last, last), self.oldest, self.is_gap)


class EventLog:
    """The latest events, by id.

    Invariant: `_events` holds exactly the ids `oldest` up to `next_id`, and `_bytes` is what they take, at most
    `bytes_max` unless there is a single one.
    """

    def __init__(self, bytes_max: int, capacities: Sequence[int]) -> None:
        self._bytes_max = bytes_max
        self._events: dict[int, Event] = {}
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
        """What they take."""
        return self._bytes

    def append(self, event: Event) -> None:
        """Take the next event; the oldest ones make room."""
        assert event.id == self.next_id
        self._events[self.next_id] = event
        self.next_id += 1
        self._bytes += _size_of(event)
        while self._bytes > self._bytes_max and len(self._events) > 1:
            self._bytes -= _size_of(self._events.pop(self.oldest))
            self.oldest += 1
            self.dropped_events += 1

    def open_gap(self) -> None:
        """Something happened that no event tells: nobody can go on from before it."""
        self.dropped_events += len(self._events)
        self.gaps += 1
        self._events.clear()
        self._bytes = 0
        self.next_id += 1
        self.oldest = self.next_id

    def since(self, last: int, bytes_max: int) -> EventSlice:
        """The events behind id `last` (-1: from the first), as many as fit, at least one where there is any."""
        if not self.oldest - 1 <= last < self.next_id:
            return EventSlice((), self.next_id - 1, self.oldest, is_gap=True)
        chosen: list[Event] = []
        size, at = 0, last + 1
        while at < self.next_id:
            event = self._events[at]
            size += _size_of(event)
            if chosen and size > bytes_max:
                break
            chosen.append(event)
            at += 1
        return EventSlice(tuple(chosen), at - 1, self.oldest, is_gap=False)

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = []
        if list(self._events) != list(range(self.oldest, self.next_id)):
            problems.append(f"events: the log does not hold exactly {self.oldest} to {self.next_id}")
        if self._bytes != sum(_size_of(event) for event in self._events.values()):
            problems.append("events: the log miscounts its bytes")
        if self._bytes > self._bytes_max and len(self._events) > 1:
            problems.append(f"events: the log takes {self._bytes} bytes, {self._bytes_max} are allowed")
        return problems


class EventWriter:
    """Joins changes to events and appends them to a log.

    Invariant: between calls of `flush` at most one event is being joined; everything before it is in the log.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._first: Change | None = None  # of the event that is being joined
        self._kind = EventKind.CREATED
        self._before = 0
        self._scope = NO_SCOPE
        self._keys: list[bytes] = []
        self._tokens: list[bytes] = []
        self._bytes = 0

    def write(self, change: Change, tokens: bytes, scope: Scope = NO_SCOPE) -> None:
        """Take a change. `tokens`: the chunk's token ids, where it arrived and they are known, and then its scope."""
        bit = 1 << change.level
        before = change.tiers
        if change.kind == ChangeKind.ARRIVED:
            before &= ~bit
        elif change.kind == ChangeKind.LEFT:
            before |= bit
        kind = _kind_of(before, change.tiers)
        if self._first is None or not self._joins(change, kind, before, tokens, scope):
            self.flush()
            self._first, self._kind, self._before, self._scope = change, kind, before, scope
        self._keys.append(change.key)
        self._tokens.append(tokens)
        self._bytes += KEY_BYTES + len(tokens)

    def flush(self) -> None:
        """Append what is being joined: readers see it from now on."""
        if self._first is None:
            return
        first, has_parent = self._first, self._kind != EventKind.REMOVED and self._first.parent != _NO_KEY
        self._log.append(
            Event(
                self._log.next_id,
                self._kind,
                first.namespace,
                b"".join(self._keys),
                first.parent if has_parent else b"",
                b"".join(self._tokens),
                first.tiers,
                self._before,
                first.priority,
                first.priority_before,
                Cause(first.cause),
                (),
                *self._scope,
            )
        )
        self._first, self._keys, self._tokens, self._bytes = None, [], [], 0

    def _joins(self, change: Change, kind: EventKind, before: int, tokens: bytes, scope: Scope) -> bool:
        first = self._first
        assert first is not None
        if (
            kind != self._kind
            or kind == EventKind.UPDATED
            or change.namespace != first.namespace
            or change[TRAITS] != first[TRAITS]
            or before != self._before
            or scope != self._scope
            or self._bytes + KEY_BYTES + len(tokens) > EVENT_PAYLOAD_BYTES_MAX
        ):
            return False
        if kind == EventKind.REMOVED:
            return True
        return change.parent == self._keys[-1] and len(tokens) == len(self._tokens[-1])


def _kind_of(before: int, after: int) -> EventKind:
    """What a chunk in tiers `before` and then in tiers `after` has met."""
    if not before:
        return EventKind.STORED
    return EventKind.UPDATED if after else EventKind.REMOVED


def _size_of(event: Event) -> int:
    return EVENT_BYTES + len(event.keys) + len(event.tokens) + len(event.adapter)
