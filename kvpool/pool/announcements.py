"""Announcements: chunks that a connection will request soon, held in DRAM or promoted to it until then.

A look-ahead over an engine's queue. Announced chunks are held like leased ones, without a right to read: chunks in DRAM stay,
those of the lower tier are promoted after all urgent reads, and where DRAM has no room for them now, the promotion is retried
when room was made. An announcement ends when its connection acquires the chunks, when it expires, or with its connection.

Bounded by bytes: all of them by `dram.announced_quota`, and one connection by half of what the others leave, so that one that
announces everything leaves room for the others. Control thread only; `now_ns` is an argument.

Invariant: `_of_owner` names every announcement; `_bytes` is the sum of their sizes; each of its holds is in exactly one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S
from kvpool.config.config import DramConfig
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Parts, Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.pool.readers.hold_task import HoldTask
from kvpool.pool.readers.runs import Run, counts_of, hold_count, naming_group
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool.tiering.tiering import Tiering

# Announcements of one connection; a hold costs little beyond its chunks, but each is examined when its connection acquires.
ANNOUNCEMENTS_MAX = 64
# Announcements retried when room was made: a guess that keeps the control thread responsive.
RETRIES = 8
# Chunks looked up at once.
FOUND_AT_ONCE = 4096


@dataclass(slots=True, eq=False)
class Announcement:
    """`chunks` leading chunks for `owner`; `is_whole`: all that they need is in DRAM or being promoted.

    `names`: keys of the first rank that end with them, of the group that names a hit where the layout has groups.
    """

    owner: ConnectionId
    names: KeyColumn
    chunks: int
    size: int
    deadline_ns: int
    task: HoldTask
    is_whole: bool = False
    is_over: bool = False

    @property
    def holds(self) -> list[HoldId]:
        """Its holds in the DRAM directory."""
        return self.task.holds

    @property
    def leaf(self) -> bytes:
        """The first rank's last key: it names all that precede it."""
        return self.names[-1]


class Announcements:
    """All announcements of the daemon."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        view: kvpool_native.IndexView,
        tiering: Tiering,
        config: DramConfig,
        *,
        ending: EndingHolds,
    ) -> None:
        """`ending`: where what they release goes."""
        self._directory = directory
        self._view = view
        self._tiering = tiering
        self._ending = ending
        self._bytes_max = int(config.capacity * config.announced_quota)
        self._ttl_ns = int(config.announced_ttl * NS_PER_S)
        self._of_owner: dict[ConnectionId, list[Announcement]] = {}
        self._bytes = 0
        self.announced_chunks = 0
        self.clipped_chunks = 0

    def __repr__(self) -> str:
        return f"<Announcements {len(self)}, {self._bytes} of {self._bytes_max} bytes>"

    def __bool__(self) -> bool:
        return bool(self._of_owner)

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._of_owner.values())

    @property
    def holds(self) -> int:
        """Holds that announcements have in the DRAM directory."""
        return sum(len(entry.holds) for entries in self._of_owner.values() for entry in entries)

    @property
    def are_waiting(self) -> bool:
        """Whether DRAM had no room for some of what is announced."""
        return any(not entry.is_whole for entries in self._of_owner.values() for entry in entries)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Bytes that each connection has announced."""
        return {
            owner: {"announced_bytes": sum(entry.size for entry in entries)}
            for owner, entries in self._of_owner.items()
        }

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of announcements made from now on."""
        self._ttl_ns = ttl_ns

    def find(self, run: Run) -> Parts[int]:
        """How many leading chunks of a chain are stored, on every rank."""
        found = run.chunks
        for column in run.columns:
            seen = count = 0
            while seen == count and seen < found:
                count += len(self._view.lookup(column[seen : seen + FOUND_AT_ONCE].packed))
                seen += FOUND_AT_ONCE
                yield None
            found = min(found, count)
        return found

    def announce(self, session: EngineSession, runs: Sequence[Run], wanted: int, now_ns: int) -> Announcement | None:
        """Protect what a hit of `wanted` chunks needs, or as many leading ones as the bounds allow: with groups all or nothing.
        Begins with `take_part`. None: no room."""
        failpoint.reach("daemon.announce.before", failpoint.refused)
        names = runs[naming_group(session)].columns[0]
        self._end_prefixes(session.connection, names, len(names) if not session.groups else wanted, now_ns)
        counts = counts_of(session, wanted)
        size = sum(count * sum(part.chunk_sizes) for count, part in zip(counts, session.parts, strict=True))
        chunks = min(wanted, wanted * self._room_of(session.connection) // size) if size else 0
        if session.groups:
            chunks = wanted if chunks == wanted and hold_count(session, wanted) <= HOLDS_MAX else 0
        else:
            names, runs = names[:chunks], [runs[0].leading(chunks)]
        self.clipped_chunks += wanted - chunks
        if not chunks:
            return None
        task = HoldTask(self._directory, self._tiering, session, runs, chunks=chunks, holder=None, ending=self._ending)
        size = size * chunks // wanted
        return self._add(Announcement(session.connection, names, chunks, size, now_ns + self._ttl_ns, task))

    def take_part(self, entry: Announcement, now_ns: int) -> Step:
        """Hold the next part of an announcement. WAIT where DRAM has no room for it now.

        When done, it has fewer chunks than before where some were evicted or belong to another namespace. One without any ends.
        """
        if entry.is_whole or entry.is_over:
            return Step.DONE
        step = entry.task.advance(now_ns)
        if step is Step.DONE:
            entry.is_whole = True
            if (held := entry.task.chunks) < entry.chunks:
                self._cut(entry, held, now_ns)
        return step

    def to_advance(self) -> list[Announcement]:
        """Announcements to be retried when room was made."""
        return [entry for entries in self._of_owner.values() for entry in entries if not entry.is_whole][:RETRIES]

    def note_use(self, owner: ConnectionId, chunks: int, key_at: Callable[[int], bytes], now_ns: int) -> None:
        """A connection has leased `chunks` chunks, which have these names: its announcements of them end."""
        for entry in [entry for entry in self._of_owner.get(owner, ()) if entry.chunks <= chunks]:
            if key_at(entry.chunks - 1) == entry.leaf:
                self._end(entry, now_ns)

    def drop_owner(self, owner: ConnectionId, now_ns: int) -> None:
        """End every announcement of a connection."""
        for entry in list(self._of_owner.get(owner, ())):
            self._end(entry, now_ns)

    def expire(self, now_ns: int) -> None:
        """End expired announcements."""
        for entry in [entry for entries in self._of_owner.values() for entry in entries]:
            if entry.deadline_ns <= now_ns:
                self._end(entry, now_ns)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            "announcements": len(self),
            "announced_bytes": self._bytes,
            "announced_chunks": self.announced_chunks,
            "announcements_clipped_chunks": self.clipped_chunks,
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        entries = [entry for entries in self._of_owner.values() for entry in entries]
        problems = []
        if sum(entry.size for entry in entries) != self._bytes or self._bytes > self._bytes_max:
            problems.append(f"announcements: {self._bytes} of {self._bytes_max} bytes are counted, not what there is")
        holds = [hold for entry in entries for hold in entry.holds]
        if len(holds) != len(set(holds)):
            problems.append("announcements: a hold is in two of them")
        return problems

    def _room_of(self, owner: ConnectionId) -> int:
        """Bytes that a connection may still announce: half of what the others leave is its own; none where it has too many."""
        entries = self._of_owner.get(owner, ())
        if len(entries) >= ANNOUNCEMENTS_MAX:
            return 0
        own = sum(entry.size for entry in entries)
        return max(0, (self._bytes_max - (self._bytes - own)) // 2 - own)

    def _end_prefixes(self, owner: ConnectionId, names: KeyColumn, chunks: int, now_ns: int) -> None:
        """End a connection's announcements of prefixes of a hit with these names: it is announced again, or extended."""
        first = chunks - len(names)
        for entry in list(self._of_owner.get(owner, ())):
            if first < entry.chunks <= chunks and names[entry.chunks - first - 1] == entry.leaf:
                self._end(entry, now_ns)

    def _add(self, entry: Announcement) -> Announcement:
        self._of_owner.setdefault(entry.owner, []).append(entry)
        self._bytes += entry.size
        self.announced_chunks += entry.chunks
        return entry

    def _cut(self, entry: Announcement, chunks: int, now_ns: int) -> None:
        """Shorten an announcement to this many chunks."""
        size = entry.size // entry.chunks * chunks
        self._bytes -= entry.size - size
        self.announced_chunks -= entry.chunks - chunks
        entry.names = entry.names[:chunks]
        entry.chunks, entry.size = chunks, size
        if not chunks:
            self._end(entry, now_ns)

    def _end(self, entry: Announcement, now_ns: int) -> None:
        owner = entry.owner
        self._of_owner[owner].remove(entry)
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        self._bytes -= entry.size
        entry.is_over = True
        entry.task.release_holds(now_ns)
