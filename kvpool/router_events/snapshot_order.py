"""Snapshot order: chunks of a snapshot with parents before children, while events go on.

Pages come in the order of records in memory, which is not that of chains. A chunk whose parent has not been published waits for
it, whether a page or an event has it; its changes meanwhile are noted, so that it is published in its state of that moment. At
most `waiting_max` wait: then the oldest ones are published before their parents, which a reader may ignore, and corrects when
they are removed.

One thread. Invariant: each chunk of `_waiting` is in its parent's list of `_children`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvpool.events import Event, EventKind, StoredChunk
from kvpool.router_events.block_hashes import block_hash


class SnapshotOrder:
    """The chunks of one snapshot, from its first page to its last."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._admitted: set[int] = (
            set()
        )  # by the end of their keys: a tenth of the memory, and a mistake costs only order
        # Not a plain dict: `admit` removes the oldest entries one by one, which takes quadratic time in a dict.
        self._waiting: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._children: dict[bytes, list[bytes]] = {}

    def admit(self, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
        """Take a page. Returns the chunks that can be published now, in order."""
        ready: list[StoredChunk] = []
        for chunk in chunks:
            if self._is_behind(chunk.parent):
                self._wait(chunk)
            else:
                self._admit(chunk, ready)
        while len(self._waiting) > self._waiting_max:
            self._admit(self._waiting.popitem(last=False)[1], ready)
        return ready

    def note_events(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Note events since the last page. Returns those to publish now; the others are of chunks that wait."""
        return tuple(event for event in events if self._is_due(event))

    def rest(self) -> list[StoredChunk]:
        """The chunks that still wait after the last page, in order: their parents came as events, or are not stored."""
        rest: list[StoredChunk] = []
        for key, chunk in list(self._waiting.items()):
            is_first = not self._is_behind(chunk.parent) or chunk.parent not in self._waiting
            if is_first and self._waiting.pop(key, None) is not None:
                self._admit(chunk, rest)
        return rest

    def _is_behind(self, parent: bytes) -> bool:
        return bool(parent) and block_hash(parent) not in self._admitted

    def _is_due(self, event: Event) -> bool:
        if event.kind == EventKind.STORED:
            return self._is_stored_due(event)
        waiting = [key for key in event.chunks if key in self._waiting]
        if event.kind == EventKind.REMOVED:
            for key in waiting:
                del self._waiting[key]
        for key in waiting if event.kind == EventKind.UPDATED else ():
            chunk = self._waiting[key]._replace(tiers=event.tiers)
            named = chunk._replace(tokens=event.tokens, adapter=event.adapter, salt_tag=event.salt_tag)
            self._waiting[key] = chunk if chunk.tokens else named
        return len(waiting) < max(1, len(event.column))

    def _is_stored_due(self, event: Event) -> bool:
        if self._is_behind(event.parent):
            for chunk in _chunks_of(event):
                self._wait(chunk)
            return False
        for key in event.chunks:
            self._waiting.pop(key, None)
            self._admitted.add(block_hash(key))
        return True

    def _wait(self, chunk: StoredChunk) -> None:
        self._waiting[chunk.key] = chunk
        self._children.setdefault(chunk.parent, []).append(chunk.key)

    def _admit(self, chunk: StoredChunk, ready: list[StoredChunk]) -> None:
        """Admit a chunk and all that have waited for it; without recursion, because chains are long."""
        todo = [chunk]
        while todo:
            now = todo.pop()
            ready.append(now)
            self._admitted.add(block_hash(now.key))
            for key in self._children.pop(now.key, ()):
                follower = self._waiting.pop(key, None)
                if follower is not None:
                    todo.append(follower)


def _chunks_of(event: Event) -> Iterator[StoredChunk]:
    """What a run of stored chunks has, one by one."""
    keys, parent = event.chunks, event.parent
    size = len(event.tokens) // len(keys)
    for at, key in enumerate(keys):
        ids = event.tokens[at * size : (at + 1) * size]
        yield StoredChunk(key, parent, event.namespace, event.tiers, event.priority, ids, event.adapter, event.salt_tag)
        parent = key
