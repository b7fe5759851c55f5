"""Journal: every change of the stored chunks, as events and as history. One for all tiers of a daemon.

Takes the changes that the directories report, which native code joins to runs, writes each run into the event log as an event,
records the history of chunks, and answers requests for events since an id, for a snapshot page by page, for the history of a
key. A subscriber that falls behind, or one that comes while a whole tier is being restored, gets a gap; then it takes a
snapshot:

    page k is the pool's state at `as_of`; between pages events go on. A reader that applies the events up to `as_of` and then
    the page's rows, page after page, has after the last one exactly the pool's state.

Invariants: changes are taken in their order, CHANGES_PER_TURN at a time, and nothing waits for a subscriber; every answer
is given when no change waits, or else holds nothing that a waiting change could contradict.

Chunks that engines report as their own are joined in, at level 0 (`engine_level`); copies are there too, and listed as DRAM's.

Control thread only, but for `recorded`. `watch` has the event loop call it when there are changes; without it, `take_changes`
does.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import kvpool_native
from kvpool.clock import Clock
from kvpool.config.event_options import EventsConfig
from kvpool.events import Cause, Event, StoredChunk
from kvpool.ids import TOKEN_BYTES, ConnectionId, NamespaceId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.journal.chunk_history import ChunkHistory, Departure, first_refused
from kvpool.journal.corrupt_chunks import CorruptChunks
from kvpool.journal.engine_chunks import EngineChunks, Source
from kvpool.journal.engine_level import EngineLevel, Report
from kvpool.journal.event_log import (
    CAUSES,
    EVENT_PAYLOAD_BYTES_MAX,
    NO_SCOPE,
    Change,
    ChangeKind,
    EventLog,
    EventSlice,
    event_of_run,
)
from kvpool.journal.snapshot_page import SNAPSHOT_END, KeyPage, SnapshotPage
from kvpool.key_column import KEY_BYTES, KeyColumn
from kvpool.keys import Scope, namespace_fingerprint, split_scope
from kvpool.row_structs import struct_of
from kvpool.states import Level, SaveState, levels_in
from kvpool.tiers.base import Headers

# A change takes 0.2 to 0.4 µs to record, 1.5 where each is an event of its own (measured): with a part of a request beside them
# a turn stays under a millisecond.
CHANGES_PER_TURN = 512
# Size of the native feed, 80 bytes each: this many changes may happen in one call of the directories without a gap.
FEED_CHANGES_MAX = 65_536
ANSWER_BYTES_MAX = 512 << 10
PAGE_CHUNKS_MAX = 128
WAITING_MAX = 256
_ROW, _ = struct_of(kvpool_native.CHANGE_ROW, "key", "unused")
_NO_KEY = bytes(KEY_BYTES)
NO_HEADERS: Mapping[Level, Headers] = MappingProxyType({})
NO_NAMES: Mapping[Level, str] = MappingProxyType({})


class Journal:
    """See above. `incarnation`: the id of this daemon process; `tiers`: each one's directory and the chunks it has room for."""

    def __init__(
        self,
        incarnation: bytes,
        tiers: Mapping[Level, tuple[kvpool_native.Directory, int]],
        namespaces: Namespaces,
        *,
        clock: Clock,
        config: EventsConfig,
        headers: Mapping[Level, Headers] = NO_HEADERS,
        names: Mapping[Level, str] = NO_NAMES,
        user_quota: float = 1.0,
    ) -> None:
        """`headers`: of the tiers from which token ids are to be read back; `names`: of tiers that are not called as their
        levels are; `user_quota`: one user's share of what engines may report as their own."""
        self.incarnation = incarnation
        self._headers = headers
        self._names = {level: level.name.lower() for level in Level} | dict(names)
        self._directories = {level: directory for level, (directory, _) in tiers.items() if level > Level.HBM}
        self._namespaces = namespaces
        self._clock = clock
        self._feed = kvpool_native.ChangeFeed(FEED_CHANGES_MAX)
        for directory, _ in tiers.values():
            directory.report_to(self._feed)
        self._log = EventLog(config.buffer, [tiers[level][1] if level in tiers else 0 for level in Level])
        self._woken_for = self._log.next_id  # the id of the next event when readers were woken last
        self._history = ChunkHistory(config.history_chunks)
        self._engines = EngineLevel(EngineChunks(user_quota), self._row_of)
        self._corrupt = CorruptChunks()
        self._chunk_tokens: dict[int, int] = {}  # by namespace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._counted: list[Callable[[], dict[str, int]]] = []
        self._troubled: list[Callable[[], list[str]]] = []

    def __repr__(self) -> str:
        return f"<Journal {self._log!r}, {self._feed.waiting} changes wait>"

    @property
    def newest(self) -> int:
        """The id of the latest event."""
        return self._log.next_id - 1

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop process changes from now on, until `close`."""
        self._loop = loop
        loop.add_reader(self._feed.fileno(), self.take_changes)

    def close(self) -> None:
        """Leave the loop. Requests that wait for events are answered."""
        if self._loop is not None:
            self._loop.remove_reader(self._feed.fileno())
            if self._turn is not None:
                self._turn.cancel()
            self._loop = None
        self._wake()

    def listen(
        self, listener: Callable[[], None], stats: Callable[[], dict[str, int]], problems: Callable[[], list[str]]
    ) -> None:
        """Have `listener` called, on the control thread, whenever there are new events. It must not wait.

        `stats` are its counters, and `problems` its faults, on any thread: the journal's own methods of these names include
        both.
        """
        self._listeners.append(listener)
        self._counted.append(stats)
        self._troubled.append(problems)

    def take_changes(self) -> None:
        """Record the waiting changes, CHANGES_PER_TURN at most; the rest in the turns of the loop that follow."""
        has_gap, rows = self._feed.take(CHANGES_PER_TURN)
        if has_gap:
            self._log.open_gap()
        if rows:
            now_ns = self._clock.now_ns()
            for run in self._directories[Level.DRAM].runs_of(rows, EVENT_PAYLOAD_BYTES_MAX):
                self._write(run, now_ns)
        if not self._feed.waiting and self._engines.chunks.is_ending:
            self._append(self._engines.drop_some(CHANGES_PER_TURN))
        if self._log.next_id != self._woken_for and not self._feed.waiting:  # a long save wakes its readers once
            self._wake()
        # Whoever has called: the descriptor says nothing of what was left.
        has_more = self._feed.waiting or self._engines.chunks.is_ending
        if has_more and self._loop is not None and self._turn is None:
            self._turn = self._loop.call_soon(self._take_next_turn)

    @property
    def is_behind(self) -> bool:
        """Whether changes of the tiers wait: an engine's report has to be taken after them."""
        return self._feed.waiting > 0

    def take_report(self, source: Source, namespace: NamespaceId, report: Report) -> bytes:
        """Take an engine's report (see `EngineLevel.record_report`): a `ReportState` for each chunk. REQUIRES: not behind."""
        assert not self.is_behind
        states, events = self._engines.record_report(source, namespace, report)
        self._append(events)
        if events:
            self._wake()
        return bytes(states)

    def end_source(self, source: Source) -> None:
        """What a source has reported is removed, in parts."""
        self._engines.chunks.drop_source(source)
        self.take_changes()

    def end_reports(self, connection: ConnectionId) -> None:
        """What a connection has reported is removed, in parts: it has ended."""
        self._engines.chunks.end_connection(connection)
        self.take_changes()

    def keep_up(self) -> bool:
        """Record waiting changes before more is evicted, and token ids with it. Whether that took a turn."""
        waiting = self._feed.waiting
        if waiting:
            self.take_changes()
        return waiting >= CHANGES_PER_TURN

    def forget_namespaces(self) -> None:
        """Drop everything that names namespaces by number: the numbers are reused from now on. Readers get a gap."""
        while self._feed.waiting:
            self._feed.take(CHANGES_PER_TURN)
        self._log.open_gap()
        self._history.clear()
        self._engines.chunks.drop_ending()  # of connections alone whose namespaces are in use
        self._chunk_tokens.clear()
        self._wake()

    def note_refusals(self, keys: KeyColumn, states: bytes, namespace: NamespaceId) -> None:
        """Record why chunks of a save were declined. `states`: a `SaveState` for each of `keys`."""
        refused = first_refused(states)
        if refused:
            kinds = [SaveState(states[at]) for at in refused]
            self._history.note_refusals(keys.chosen(refused), kinds, self._clock.now_ns(), namespace)

    def since(self, incarnation: bytes, last: int, bytes_max: int = ANSWER_BYTES_MAX) -> EventSlice:
        """Events after id `last` of an incarnation (empty: the present one), as many as fit."""
        self.take_changes()
        if incarnation not in (b"", self.incarnation):
            return EventSlice((), self._log.next_id - 1, self._log.oldest, is_gap=True)
        return self._log.since(last, bytes_max)

    def recorded(self, last: int, bytes_max: int = ANSWER_BYTES_MAX) -> tuple[EventSlice, dict[int, Namespace]]:
        """Events after id `last` that are recorded, as many as fit, and the namespaces that they name. Any thread."""
        with self._log.lock:  # a number is reused only after a gap was opened
            found = self._log.since(last, bytes_max)
            numbers = {event.namespace for event in found.events if event.namespace >= 0}
            return found, {number: self._namespaces.by_id(NamespaceId(number)) for number in numbers}

    async def wait_for_events(self, last: int, timeout_s: float) -> None:
        """Wait until there is an event after id `last`, or the time is over; at once where too many wait already."""
        if self._log.next_id - 1 > last or len(self._waiting) >= WAITING_MAX:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        try:
            await asyncio.wait_for(news, timeout_s)
        except asyncio.TimeoutError:
            return
        finally:
            self._waiting.discard(news)

    def snapshot(self, cursor: int, *, is_urgent: bool = False) -> SnapshotPage:
        """Chunks from a cursor on (0: the first page). A page may be empty and yet not the last. `is_urgent`: its reads from
        disk go first."""
        at_engines = len(self._directories) << 32
        if at_engines <= cursor < at_engines + (1 << 32):
            return self._engine_page(cursor, at_engines)
        level, rows, following = self._list(cursor, self._page_chunks())
        if following == SNAPSHOT_END and 0 <= cursor < at_engines and len(self._engines.chunks):
            following = at_engines
        chunks = tuple(self._stored(Change(*row)) for row in _ROW.iter_unpack(rows))
        page = SnapshotPage(chunks, self._log.next_id - 1, following)
        if level not in self._headers:
            return page
        return self._with_ids_asked_for(page, level, is_urgent=is_urgent)

    def keys(self, cursor: int, keys_max: int) -> KeyPage:
        """The keys alone of the chunks in the node's tiers from a cursor on; other nodes cannot have engines' own."""
        _, rows, following = self._list(cursor, keys_max)
        keys = KeyColumn.of([row[0] for row in _ROW.iter_unpack(rows)])
        return KeyPage(keys, self._log.next_id - 1, following)

    def has(self, key: bytes) -> bool:
        """Whether some tier of this node has a chunk now: events may not say so yet. An engine's own is in none."""
        return self._row_of(key) is not None

    def chunk_tokens(self, namespace: int) -> int:
        """How many token ids each chunk of a namespace has."""
        return self._namespaces.by_id(NamespaceId(namespace)).layout.chunk_tokens

    def explain(self, key: bytes) -> dict[str, Any]:
        """Explain a chunk's state, for people: whether and where it is stored, or its history."""
        self.take_changes()
        row = self._row_of(key)
        stored = self._engines.find(key) if row is None else self._stored(row)
        if stored is not None:
            return {
                "state": "stored",
                "tiers": [self._names[level] for level in levels_in(stored.tiers)],
                "priority": stored.priority,
                **self._namespaces.place_of(stored.namespace),
                "has_parent": bool(stored.parent),
            }
        return self._history.explain(key, self._namespaces.place_of, self._clock.now_ns())

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        counted = {name: count for stats in self._counted for name, count in stats().items()}
        return {
            "events.written": self._log.next_id - self._log.gaps,
            "events.buffered": self._log.events,
            "events.buffered_bytes": self._log.used_bytes,
            "events.dropped": self._log.dropped_events,
            "events.gaps": self._log.gaps,
            "events.lost_changes": self._feed.lost,
            "events.history_chunks": len(self._history),
            **self._engines.stats(),
            **{name: count for headers in self._headers.values() for name, count in headers.stats().items()},
            **counted,
        }

    def problems(self) -> list[str]:
        """Faults of the listener, one line each. Any thread."""
        return [problem for problems in self._troubled for problem in problems()]

    def info(self) -> dict[str, str]:
        """Models whose chunks were found corrupt and dropped, with their descendants, and how many of each."""
        return self._corrupt.info()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._log.verify() + self._engines.chunks.verify()

    def _write(self, run: kvpool_native.ChangeRun, now_ns: int) -> None:
        event = event_of_run(run, self._log.next_id)
        if len(self._engines.chunks):
            self._append(self._engines.joined(event))
        else:
            self._log.append(event)
        if run.change_kind == ChangeKind.ARRIVED:
            return
        keys, namespace = KeyColumn(run.keys), NamespaceId(run.namespace)
        if run.cause == Cause.DROPPED:
            self._corrupt.note_chunks(self._model(namespace), len(keys))
        if not run.tiers:
            self._history.note_departures(
                keys, Departure(now_ns, CAUSES[run.cause], run.level, run.priority, namespace)
            )

    def _append(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log.append(event._replace(id=self._log.next_id))

    def _row_of(self, key: bytes) -> Change | None:
        """A chunk's row in the fastest tier that has it."""
        rows = (directory.find(key) for directory in self._directories.values())
        return next((Change(*_ROW.unpack(row)) for row in rows if row), None)

    def _take_next_turn(self) -> None:
        self._turn = None
        self.take_changes()

    def _wake(self) -> None:
        self._woken_for = self._log.next_id
        waiting, self._waiting = self._waiting, set()
        for news in waiting:
            if not news.done():
                news.set_result(None)
        for listener in self._listeners:
            listener()

    def _list(self, cursor: int, most: int) -> tuple[Level, bytes, int]:
        """Rows of chunks from a cursor on, the level that they are of, and the cursor behind them."""
        self.take_changes()
        levels = sorted(self._directories)
        number, place = divmod(cursor, 1 << 32)
        if cursor < 0 or number >= len(levels):
            return levels[-1], b"", SNAPSHOT_END
        if self._feed.waiting:  # the stored state is ahead of the log: ask again
            return levels[number], b"", cursor
        next_place, rows = self._directories[levels[number]].list_chunks(place, most)
        if next_place:
            return levels[number], rows, number << 32 | next_place
        return levels[number], rows, number + 1 << 32 if number + 1 < len(levels) else SNAPSHOT_END

    def _engine_page(self, cursor: int, first: int) -> SnapshotPage:
        """Chunks that engines alone have, which stand behind those of all tiers."""
        self.take_changes()
        if self._feed.waiting:
            return SnapshotPage((), self._log.next_id - 1, cursor)
        chunks, slot = self._engines.page(cursor - first, self._page_chunks())
        return SnapshotPage(tuple(chunks), self._log.next_id - 1, first + slot if slot else SNAPSHOT_END)

    def _page_chunks(self) -> int:
        """As many chunks as have token ids that fit an answer."""
        longest = max((namespace.layout.chunk_tokens for namespace in self._namespaces.all()), default=1)
        row_bytes = _ROW.size + 4 * min(longest, kvpool_native.TOKEN_IDS_MAX)
        return max(1, min(PAGE_CHUNKS_MAX, ANSWER_BYTES_MAX // row_bytes))

    def _stored(self, row: Change) -> StoredChunk:
        parent = b"" if row.parent == _NO_KEY else row.parent
        words = self._directories[Level.DRAM].tokens_of(row.key)
        tokens, scope = self._split(words, row.namespace)
        tiers = row.tiers | self._engines.tiers_of(row.key, row.namespace)
        return StoredChunk(row.key, parent, row.namespace, tiers, row.priority, tokens, *scope)

    def _split(self, words: bytes, namespace: int) -> tuple[bytes, Scope]:
        token_bytes = TOKEN_BYTES * self._tokens_of_a_chunk(namespace)
        if not words or len(words) == token_bytes:
            return words, NO_SCOPE
        return split_scope(words, token_bytes)

    def _tokens_of_a_chunk(self, namespace: int) -> int:
        tokens = self._chunk_tokens.get(namespace)
        if tokens is None:
            tokens = self._chunk_tokens[namespace] = self.chunk_tokens(namespace)
        return tokens

    def _with_ids_asked_for(self, page: SnapshotPage, level: Level, *, is_urgent: bool) -> SnapshotPage:
        """Start to read the token ids that are not in memory."""
        lacking = tuple(at for at, chunk in enumerate(page.chunks) if not chunk.tokens)
        if not lacking:
            return page
        fingerprints = {number: self._fingerprint(number) for number in {page.chunks[at].namespace for at in lacking}}
        place_of = self._directories[level].place_of
        chunks = (page.chunks[at] for at in lacking)
        places = [(chunk.key, fingerprints[chunk.namespace], *place_of(chunk.key)) for chunk in chunks]
        words = self._headers[level].request_headers(places, is_urgent=is_urgent)
        return SnapshotPage(page.chunks, page.as_of, page.cursor, lacking, words)

    def _model(self, namespace: int) -> str:
        return self._namespaces.by_id(NamespaceId(namespace)).model

    def _fingerprint(self, namespace: int) -> bytes:
        found = self._namespaces.by_id(NamespaceId(namespace))
        return namespace_fingerprint(found.model, found.layout)
