"""A reader of events that records them: the model of a subscriber, for tests to compare with the pool.

Knows nothing of where events come from: `Replica` is given events and snapshot pages, and says what the pool must have now.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.events import Event, EventKind, StoredChunk


@dataclass
class Known:
    """A reader's knowledge of one chunk."""

    parent: bytes
    namespace: int
    tiers: int
    priority: int
    tokens: bytes
    adapter: str = ""
    salt_tag: bytes = b""


@dataclass
class Replica:
    """The sum of the events. `is_strict`: no event may name an unknown chunk."""

    is_strict: bool = True
    last: int = -1
    chunks: dict[bytes, Known] = field(default_factory=dict)

    def apply(self, events: Iterable[Event]) -> None:
        """Take events, which must follow what was taken before."""
        for event in events:
            assert event.id == self.last + 1, f"event {event.id} behind {self.last}"
            self.last = event.id
            if event.kind == EventKind.STORED:
                self._stored(event)
            elif event.kind == EventKind.REMOVED:
                self._removed(event)
            elif event.kind == EventKind.UPDATED:
                self._updated(event)

    def merge(self, chunks: Iterable[StoredChunk]) -> None:
        """Take a page of a snapshot."""
        for chunk in chunks:
            self.chunks[chunk.key] = Known(*chunk[1:])

    def begin_snapshot(self, as_of: int) -> None:
        """Forget everything: a snapshot begins at this event."""
        self.chunks.clear()
        self.last = as_of
        self.is_strict = False

    def tiers(self) -> dict[bytes, int]:
        """Tiers by key."""
        return {key: known.tiers for key, known in self.chunks.items()}

    def _stored(self, event: Event) -> None:
        assert event.tiers_before == 0
        parent, size = event.parent, len(event.tokens) // len(event.chunks)
        for number, key in enumerate(event.chunks):
            assert not self.is_strict or key not in self.chunks, "stored twice"
            assert not self.is_strict or not parent or parent in self.chunks, "stored behind what is not there"
            tokens = event.tokens[number * size : (number + 1) * size]
            scope = event.adapter, event.salt_tag
            self.chunks[key] = Known(parent, event.namespace, event.tiers, event.priority, tokens, *scope)
            parent = key

    def _removed(self, event: Event) -> None:
        assert event.tiers == 0
        for key in event.chunks:
            known = self.chunks.pop(key, None)
            assert not self.is_strict or known is not None, "removed what is not there"
            assert known is None or known.tiers == event.tiers_before or not self.is_strict

    def _updated(self, event: Event) -> None:
        (key,) = event.chunks
        known = self.chunks.get(key)
        assert not self.is_strict or (known is not None and known.tiers == event.tiers_before)
        if known is None and not event.gained:
            return
        if known is None:
            scope = event.adapter, event.salt_tag
            self.chunks[key] = Known(event.parent, event.namespace, event.tiers, event.priority, event.tokens, *scope)
            return
        known.tiers, known.priority = event.tiers, event.priority
        if event.tokens:
            known.tokens, known.adapter, known.salt_tag = event.tokens, event.adapter, event.salt_tag
