"""Engine level: what engines' chunks mean for the event stream, joined with what the daemon's own tiers have.

A chunk's tiers in events are those of the directories, and level 0 where an engine has it. A directory of copies in device
memory is at level 0 too: a chunk leaves that level when neither it nor an engine has the chunk.

    an engine reports a chunk        STORED where no tier has it, else an UPDATED that gains level 0
    the last engine drops it         REMOVED where no tier has it, else an UPDATED that loses level 0
    a tier's own change              as the directories report it, with level 0 before and after where an engine has the chunk

So the events of engines and tiers add up as those of tiers alone do. REQUIRES of all that makes events here: the log has every
change of the directories, because a chunk's tiers are those of now. Events are made without ids. Control thread only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvpool.events import Cause, Event, EventKind, StoredChunk
from kvpool.ids import NamespaceId
from kvpool.journal.engine_chunks import EngineChunk, EngineChunks, Record, Source
from kvpool.journal.event_log import EVENT_PAYLOAD_BYTES_MAX, Change
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.states import DEFAULT_PRIORITY, Level, ReportState

ENGINE_TIER = 1 << Level.HBM
_NO_ID = -1


class Report(Protocol):
    """What a source reports at once."""

    @property
    def removed(self) -> KeyColumn:
        """Chunks that it has no more, children before their parents."""

    @property
    def stored(self) -> Sequence[EngineChunk]:
        """Chunks that it has from now on, parents before their children."""


class EngineLevel:
    """See the module. `row_of`: a chunk's row in the directories, None where no tier has it."""

    def __init__(self, chunks: EngineChunks, row_of: Callable[[bytes], Change | None]) -> None:
        self.chunks = chunks
        self._row_of = row_of
        self.declined_chunks = 0

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            "events.engine_chunks": len(self.chunks),
            "events.engine_chunk_record_bytes": self.chunks.used_bytes,
            "events.declined_engine_chunks": self.declined_chunks,
        }

    def record_report(
        self, source: Source, namespace: NamespaceId, report: Report
    ) -> tuple[list[ReportState], list[Event]]:
        """Record a report: a state for each chunk that is stored, and the events. Raises InvalidArgument, and then nothing has
        changed."""
        self.chunks.check_removal(source, report.removed)
        gone = [self.chunks.remove(source, key) for key in report.removed]
        events = list(self._departures(record for record in gone if record is not None))
        states: list[ReportState] = []
        arrived: list[Record] = []
        for chunk in report.stored:
            state, record = self._take_chunk(source, namespace, chunk)
            states.append(state)
            if record is not None:
                arrived.append(record)
        self.declined_chunks += len(states) - states.count(ReportState.TAKEN)
        return states, events + list(self._arrivals(arrived))

    def drop_some(self, limit: int) -> list[Event]:
        """Drop chunks of sources that have ended."""
        return list(self._departures(self.chunks.drop_some(limit)))

    def joined(self, event: Event) -> list[Event]:
        """A directory's event, with level 0 where engines have its chunks."""
        keys = event.chunks
        records = [self.chunks.get(key) for key in keys]
        if not any(records):
            return [event]
        return [
            joined
            for number, (part, record) in enumerate(zip(_parts(event, records), records, strict=True))
            for joined in self._joined_one(part, record, keys[number])
        ]

    def tiers_of(self, key: bytes, namespace: int) -> int:
        """The bit of level 0 where an engine has this chunk of a namespace."""
        return ENGINE_TIER if self.chunks.has(key, namespace) else 0

    def page(self, slot: int, most: int) -> tuple[list[StoredChunk], int]:
        """Chunks of a snapshot that no directory has, `most` slots from one on, and the next slot; 0: the last page."""
        records, following = self.chunks.page(slot, most)
        found = [_stored_chunk(record) for record in records if self._row_of(record.chunk.key) is None]
        return found, following

    def find(self, key: bytes) -> StoredChunk | None:
        """A chunk that engines have, as a snapshot has one that no tier has."""
        record = self.chunks.get(key)
        return None if record is None or record.is_void else _stored_chunk(record)

    def _take_chunk(
        self, source: Source, namespace: NamespaceId, chunk: EngineChunk
    ) -> tuple[ReportState, Record | None]:
        if self.chunks.has_reported(source, chunk.key):
            return ReportState.TAKEN, None
        if chunk.parent and not self.chunks.has_reported(source, chunk.parent):
            return ReportState.NO_PARENT, None
        record, row = self.chunks.get(chunk.key), self._row_of(chunk.key)
        owner = row.namespace if row is not None else record.namespace if record is not None else namespace
        if owner != namespace or (record is not None and (record.namespace != namespace or record.is_void)):
            return ReportState.FOREIGN, None
        if not self.chunks.has_room(source, chunk):
            return ReportState.FULL, None
        return ReportState.TAKEN, self.chunks.add_chunk(source, namespace, chunk)

    def _arrivals(self, records: Iterable[Record]) -> Iterator[Event]:
        """Events of chunks that the first source has reported; those of a chain are one."""
        run: list[Record] = []
        for record in records:
            row = self._row_of(record.chunk.key)
            if run and not (row is None and _follows(record, run)):
                yield _stored(run)
                run = []
            if row is None:
                run.append(record)
            elif not row.tiers & ENGINE_TIER:
                yield _update(record, row, before=row.tiers, after=row.tiers | ENGINE_TIER)
        if run:
            yield _stored(run)

    def _departures(self, records: Iterable[Record]) -> Iterator[Event]:
        """Events of chunks that the last source has dropped; those of one namespace are one, as far as they follow."""
        run: list[Record] = []
        for record in records:
            if record.is_void:
                continue
            row = self._row_of(record.chunk.key)
            if run and (row is not None or record.namespace != run[0].namespace):
                yield _removed(run)
                run = []
            if row is None:
                run.append(record)
            elif not row.tiers & ENGINE_TIER:
                yield _update(record, row, before=row.tiers | ENGINE_TIER, after=row.tiers)
        if run:
            yield _removed(run)

    def _joined_one(self, event: Event, record: Record | None, key: bytes) -> Iterator[Event]:
        if record is None or record.is_void or not key:
            yield event
            return
        if record.namespace != event.namespace:
            # The bytes are here, and of another namespace: what was reported about this key is void.
            if event.tiers:
                record.is_void = True
                yield _removed([record])
            yield event
            return
        before, after = event.tiers_before | ENGINE_TIER, event.tiers | ENGINE_TIER
        priority_before = event.priority_before if event.tiers_before else DEFAULT_PRIORITY
        priority = event.priority if event.tiers else DEFAULT_PRIORITY
        if not event.tiers:
            priority_before = event.priority
        if (before, priority_before) == (after, priority):
            return
        if event.gained and not event.tokens:
            chunk = record.chunk
            event = event._replace(tokens=chunk.tokens, adapter=chunk.scope.adapter, salt_tag=chunk.scope.salt_tag)
        yield event._replace(
            kind=EventKind.UPDATED,
            tiers=after,
            tiers_before=before,
            priority=priority,
            priority_before=priority_before,
        )


def _stored_chunk(record: Record) -> StoredChunk:
    key, parent, tokens, scope = record.chunk
    return StoredChunk(key, parent, record.namespace, ENGINE_TIER, DEFAULT_PRIORITY, tokens, *scope)


def _parts(event: Event, records: Sequence[Record | None]) -> list[Event]:
    """An event cut into one for each of its chunks."""
    if len(records) == 1:
        return [event]
    size = len(event.tokens) // len(records)
    parents = event.column.parents(event.parent) if event.kind == EventKind.STORED else [event.parent] * len(records)
    return [
        event._replace(keys=key, parent=parent, tokens=event.tokens[number * size : (number + 1) * size])
        for number, (key, parent) in enumerate(zip(event.chunks, parents, strict=True))
    ]


def _follows(record: Record, run: Sequence[Record]) -> bool:
    chunk, last = record.chunk, run[-1].chunk
    return (
        chunk.parent == last.key
        and record.namespace == run[-1].namespace
        and chunk.scope == last.scope
        and len(chunk.tokens) == len(last.tokens)
        and (len(run) + 1) * (packed_bytes(1) + len(chunk.tokens)) <= EVENT_PAYLOAD_BYTES_MAX
    )


def _stored(run: Sequence[Record]) -> Event:
    return Event(
        _NO_ID,
        EventKind.STORED,
        namespace=run[0].namespace,
        keys=b"".join(record.chunk.key for record in run),
        parent=run[0].chunk.parent,
        tokens=b"".join(record.chunk.tokens for record in run),
        tiers=ENGINE_TIER,
        adapter=run[0].chunk.scope.adapter,
        salt_tag=run[0].chunk.scope.salt_tag,
    )


def _removed(run: Sequence[Record]) -> Event:
    return Event(
        _NO_ID,
        EventKind.REMOVED,
        namespace=run[0].namespace,
        keys=b"".join(record.chunk.key for record in run),
        tiers_before=ENGINE_TIER,
        cause=Cause.DISCARDED,
    )


def _update(record: Record, row: Change, *, before: int, after: int) -> Event:
    chunk, has_gained = record.chunk, after > before
    return Event(
        _NO_ID,
        EventKind.UPDATED,
        namespace=record.namespace,
        keys=chunk.key,
        parent=chunk.parent,
        tokens=chunk.tokens if has_gained else b"",
        tiers=after,
        tiers_before=before,
        priority=row.priority,
        priority_before=row.priority,
        cause=Cause.STORED if has_gained else Cause.DISCARDED,
        adapter=chunk.scope.adapter if has_gained else "",
        salt_tag=chunk.scope.salt_tag if has_gained else b"",
    )
