"""Snapshot order: chunks of a snapshot with parents before children, while events go on.

Pages come in the order of records in memory, which is not that of chains. A chunk whose parent has not been published waits for
it; its changes meanwhile are noted, so that it is published in its state of that moment. At most `waiting_max` wait: then the
oldest ones are published before their parents, which a reader may ignore, and corrects when they are removed.

One thread. Invariant: `_waiting` holds exactly the chunks in the lists of `_children`.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvpool.router_events.block_hashes import block_hash
from kvpool.types import Event, EventKind, StoredChunk


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
            if chunk.parent and block_hash(chunk.parent) not in self._admitted:
                self._waiting[chunk.key] = chunk
                self._children.setdefault(chunk.parent, []).append(chunk.key)
            else:
                self._admit(chunk, ready)
        while len(self._waiting) > self._waiting_max:
            self._admit(self._waiting.popitem(last=False)[1], ready)
        return ready

    def note(self, events: Iterable[Event]) -> None:
        """Note events since the last page."""
        for event in events:
            for key in event.chunks:
                chunk = self._waiting.get(key)
                if event.kind == EventKind.STORED:
                    self._admitted.add(block_hash(key))
                if chunk is None:
                    continue
                if event.kind == EventKind.UPDATED:
                    self._waiting[key] = chunk._replace(tiers=event.tiers, tokens=chunk.tokens or event.tokens)
                else:
                    del self._waiting[key]

    def rest(self) -> list[StoredChunk]:
        """The chunks that still wait after the last page: their parents came as events."""
        rest, self._waiting = list(self._waiting.values()), OrderedDict()
        return rest

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
