"""Handlers of hints: retention requests, announcements, demote hints.

Joins retention and announcements (`index`) with the tiers. The pool owns one; its public methods are the verbs of a connection.
None of them waits for a disk. Control thread only.

Invariant: while an announcement lives, the pool's expiry is scheduled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from kvpool.clock import Clock
from kvpool.errors import ProtocolError
from kvpool.ids import ConnectionId
from kvpool.index.leases import Lease
from kvpool.index.namespaces import Namespaces
from kvpool.index.parts import PART_CHUNKS, Parts, Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.journal.journal import Journal
from kvpool.key_column import KeyColumn
from kvpool.pool.announcements import Announcement, Announcements
from kvpool.pool.readers.readers import Readers, Taken
from kvpool.pool.readers.runs import runs_of_hit
from kvpool.pool.writers.retention import Retention, RetentionColumns
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.states import PRIORITY_MAX, RetainState
from kvpool.tiering.tiering import Tiering

DURATION_S_MAX = ((1 << 32) - 1) / 1000


class HintHandlers:
    """See the module. `on_due`: schedules the pool's expiry."""

    def __init__(
        self,
        retention: Retention,
        announcements: Announcements,
        namespaces: Namespaces,
        *,
        tiering: Tiering,
        journal: Journal,
        clock: Clock,
        on_due: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._namespaces = namespaces
        self._tiering = tiering
        self._journal = journal
        self._on_due = on_due
        self._retention = retention
        self._announcements = announcements

    @property
    def has_announcements(self) -> bool:
        """Whether any live."""
        return bool(self._announcements)

    @property
    def holds(self) -> int:
        """Holds that announcements have in the DRAM directory."""
        return self._announcements.holds

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of announcements made from now on."""
        self._announcements.change_ttl(ttl_ns)

    @verb(m.Retain, roles=ENGINE)
    def retain(self, session: EngineSession, request: m.Retain) -> Parts[m.Retained]:
        """Set the retention of chunks, on every rank the session stands for."""
        ranks = len(session.namespaces)
        keys = columns.keys_of(request.keys, ranks=ranks)
        chunks = len(keys) // ranks
        columns.check_retention_columns(chunks, ranks=ranks)
        columns.check_retention(request.priorities, request.durations, chunks)
        wanted, states = RetentionColumns(request.priorities, request.durations), b""
        while True:
            first, end = len(states), len(states) + part_chunks(ranks)
            part = keys.part_of_ranks(ranks, first=first, end=end)
            states += self._retention.retain(session, part, wanted.part(first, end), self._clock.now_ns())
            if len(states) == chunks:
                return m.Retained(states)
            yield None

    @verb(m.Demote, roles=ENGINE)
    def demote(self, session: EngineSession, request: m.Demote) -> Parts[m.Retained]:
        """Write chunks to the lower tier, and have DRAM evict them first; with groups what is stored of them in each."""
        ranks = len(session.namespaces)
        keys = columns.keys_of(request.keys, ranks=ranks)
        chunks = len(keys) // ranks
        if not 0 <= request.first < chunks:
            raise ProtocolError(f"first is {request.first}, expected 0..{chunks - 1}")
        columns.check_retention_columns(chunks - request.first, ranks=ranks)
        states = b""
        for start in range(0, chunks, part_chunks(ranks)):
            parents = keys.part_of_ranks(ranks, first=max(0, start - 1), end=start)
            part = keys.part_of_ranks(ranks, first=start, end=start + part_chunks(ranks))
            first, now_ns = request.first - start, self._clock.now_ns()
            states += self._retention.demote(session, part, parents=parents, first=first, now_ns=now_ns)
            yield None
        return m.Retained(states)

    @verb(m.Announce, roles=ENGINE)
    def announce(self, session: EngineSession, request: m.Announce) -> Parts[m.Announced]:
        """Protect chunks that will be asked for soon, and have those of lower tiers come up: of leading ones those that are
        stored, of a layout with groups all that a hit needs or nothing."""
        runs = runs_of_hit(session, request.keys, request.chunks)
        wanted = request.chunks if session.groups else (yield from self._announcements.find(runs[0]))
        entry = self._announcements.announce(session, runs, wanted, self._clock.now_ns())
        if entry is None:
            return m.Announced(0, wanted)
        clipped = wanted - entry.chunks
        self._on_due()
        while self._take_part(entry) is Step.MORE:
            yield None
        if self._announcements.are_waiting:
            self._tiering.make_room()
        return m.Announced(entry.chunks, clipped)

    def retain_keys(self, request: m.RetainKeys) -> Awaitable[m.Retained]:
        """Set one priority for chunks of any namespace: an operator's order, which lets other requests in between."""
        keys = columns.keys_of(request.keys)
        columns.check_retention_columns(len(keys), ranks=1)
        if not 0 <= request.priority <= PRIORITY_MAX or not 0.0 <= request.duration_s <= DURATION_S_MAX:
            expected = f"0..{PRIORITY_MAX} and 0..{DURATION_S_MAX:.0f}"
            raise ProtocolError(
                f"priority is {request.priority} and duration_s {request.duration_s}, expected {expected}"
            )
        return self._retain_everywhere(keys, request.priority, -int(-request.duration_s * 1000 // 1))

    def note_lease(self, session: EngineSession, readers: Readers, lease: Lease | Taken) -> None:
        """A connection has leased chunks that it may have announced, or tickets on them."""
        if not self._announcements:
            return
        key_at = partial(readers.key_at, session, lease)
        self._announcements.note_use(session.connection, lease.chunks, key_at, self._clock.now_ns())

    def note_room(self) -> None:
        """Chunks have moved between the tiers, or memory has become ready."""
        for entry in self._announcements.to_advance() if self._tiering else ():
            self._take_part(entry)

    def drop_owner(self, connection: ConnectionId) -> None:
        """End every announcement of a connection."""
        self._announcements.drop_owner(connection, self._clock.now_ns())

    def expire(self) -> bool:
        """End expired announcements. Whether any are left."""
        self._announcements.expire(self._clock.now_ns())
        self.note_room()
        return len(self._announcements) > 0

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return self._announcements.stats()

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Counts of each connection, by name."""
        return self._announcements.count_by_owner()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._announcements.verify()

    def _take_part(self, entry: Announcement) -> Step:
        self._journal.keep_up()
        with self._tiering.protecting(True):
            return self._announcements.take_part(entry, self._clock.now_ns())

    async def _retain_everywhere(self, keys: KeyColumn, priority: int, duration_ms: int) -> m.Retained:
        states = bytearray([RetainState.ABSENT]) * len(keys)
        for namespace in self._namespaces.all():
            absent = [number for number, state in enumerate(states) if state == RetainState.ABSENT]
            for start in range(0, len(absent), PART_CHUNKS):
                part = absent[start : start + PART_CHUNKS]
                wanted = RetentionColumns.of_each(len(part), priority, duration_ms=duration_ms)
                found = self._retention.retain_in(namespace, keys.chosen(part), wanted, self._clock.now_ns())
                for number, state in zip(part, found, strict=True):
                    states[number] = state
                await asyncio.sleep(0)
        return m.Retained(bytes(states))
