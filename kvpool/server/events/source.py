"""Event source for a thread beside the control thread: events, snapshot pages, and the namespaces that they name.

Events are read from the journal's log where the thread is: the control thread is not woken for them. Pages, and the models of
new namespaces, hop to the control thread, are read there within a turn of the loop, and wait with a deadline. One thread at a
time, never the loop's own.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from kvpool.ids import NamespaceId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.journal.event_log import EventSlice
from kvpool.journal.journal import Journal
from kvpool.journal.snapshot_page import SnapshotPage
from kvpool.router_events.columns import NamespaceNames
from kvpool.server.metrics.measurements import LoopReader

READ_TIMEOUT_S = 5.0
# A page of headers takes about 10 ms; a disk that hangs must not delay events to routers.
HEADERS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class NamedEvents:
    """Events, and the namespaces that they name. `models`: those of all namespaces, where some were opened since the last
    read."""

    slice: EventSlice
    namespaces: NamespaceNames
    models: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NamedPage:
    """A page of a snapshot, and the namespaces that it names."""

    page: SnapshotPage
    namespaces: NamespaceNames

    def chunk_tokens(self, namespace: int) -> int:
        """The number of token ids in each chunk of a namespace."""
        return self.namespaces[namespace][1].chunk_tokens


class EventSource:
    """The journal for another thread. A read that came too late is repeated from the same position."""

    def __init__(self, loop: asyncio.AbstractEventLoop, journal: Journal, namespaces: Namespaces) -> None:
        self._journal = journal
        self._namespaces = namespaces
        self._cursor = 0
        self._opened = 0  # namespaces whose models were read
        self.late_pages = 0
        self._models = LoopReader(loop, self._read_models, READ_TIMEOUT_S)
        self._pages = LoopReader(loop, self._read_page, READ_TIMEOUT_S)

    def since(self, last: int) -> NamedEvents:
        """The events after id `last`. Raises LoopStalled where namespaces are new."""
        models: frozenset[str] = frozenset()
        if self._namespaces.opened != self._opened:
            models, self._opened = self._models.read()
        events, namespaces = self._journal.recorded(last)
        return NamedEvents(events, _names_of(namespaces), models)

    def snapshot(self, cursor: int) -> NamedPage:
        """A page of a snapshot, with the token ids that the disk gives in time. Raises LoopStalled."""
        self._cursor = cursor
        found = self._pages.read()
        if found.page.words is None:
            return found
        try:
            words = found.page.words.result(HEADERS_TIMEOUT_S)
        except FutureTimeoutError:
            self.late_pages += 1
            return found
        return NamedPage(found.page.with_words(words, found.chunk_tokens), found.namespaces)

    def _read_models(self) -> tuple[frozenset[str], int]:
        return frozenset(one.model for one in self._namespaces.all()), self._namespaces.opened

    def _read_page(self) -> NamedPage:
        page = self._journal.snapshot(self._cursor, is_urgent=True)
        named = {chunk.namespace: self._namespaces.by_id(NamespaceId(chunk.namespace)) for chunk in page.chunks}
        return NamedPage(page, _names_of(named))


def _names_of(namespaces: Mapping[int, Namespace]) -> NamespaceNames:
    return {number: (one.model, one.layout) for number, one in namespaces.items()}
