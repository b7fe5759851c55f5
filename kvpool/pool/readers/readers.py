"""Readers: leases and tickets on stored chunks, over the holds of the native directory.

Joins the directory, which protects chunks, with the records of owners and deadlines. It schedules nothing and handles no
protocol; `now_ns` is an argument. Control thread only.

Invariant: every hold that a reader has in the directory is in exactly one lease or ticket, is just being taken for one, or is
just ending. Those of leases and tickets count there for the connection of the lease, or for all tickets together: these may
outlive their issuers.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, cast
from weakref import WeakSet

import kvpool_native
from kvpool import failpoint
from kvpool.errors import Refused
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.leases import HELD_CHUNKS_MAX, HoldsByRank, Lease, Leases, TicketHold
from kvpool.index.miss_ratio_curve import MissRatioCurve
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import PART_CHUNKS
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.pool.readers.hold_bounds import PEERS_USER
from kvpool.pool.readers.hold_task import HoldTask, WaitingTasks
from kvpool.pool.readers.runs import Run, counts_of, hold_count, naming_group
from kvpool.pool.readers.set_task import SetTask
from kvpool.protocol.records.messages import HOLDS_MAX, LEAF_CHUNKS_MAX, Leased
from kvpool.tiering.tiering import Tiering


class AnyHit(Protocol):
    """A request about a hit, as `m.Acquire`."""

    keys: bytes
    chunks: int


class Taken(NamedTuple):
    """Holds that a lease or a ticket is made of next: on each rank, of `rows` chunks together. They count for a holder.
    `set_group`: whose chunks they are, where they are a set of that group's alone."""

    chunks: int
    holds: HoldsByRank
    rows: int
    set_group: int | None = None


# Holds of the tickets of one promise: they may all end at once, before what others release.
TICKETS_HOLDS_MAX = 16 * HOLDS_MAX
# The owner number of tickets' holds: no connection has it.
TICKETS = ConnectionId(0)
NOTHING_TAKEN = Taken(0, {}, 0)
NOTHING = Leased(0, 0, b"", b"", b"", b"")


class Readers:
    """All readers of the daemon. `leases_max` bounds the leases of one connection. `ending`: where holds end in parts."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        hit_curve: MissRatioCurve | None = None,
        *,
        ttl_ns: int,
        leases_max: int,
        on_backlog: Callable[[], None] | None = None,
    ) -> None:
        """`on_backlog` has `expire` called soon; without it every hold is ended at once."""
        self._directory = directory
        self._tiering = tiering
        self._hit_curve = hit_curve
        self._leases = Leases(ttl_ns)
        self._leases_max = leases_max
        self._acquiring: WeakSet[HoldTask | SetTask] = WeakSet()
        self._waiting: WaitingTasks = {}
        self.ending = EndingHolds(directory, on_backlog)
        self.desk = kvpool_native.LeaseDesk(
            directory,
            self._leases.table,
            self.ending.queue,
            None if hit_curve is None else hit_curve.distances,
            leases_max,
            HELD_CHUNKS_MAX,
            LEAF_CHUNKS_MAX,
            PART_CHUNKS,
            not tiering.remotes,
        )

    def __repr__(self) -> str:
        return f"<Readers {self.leases} leases, {self.tickets} tickets>"

    def change_ttl(self, ttl_ns: int) -> None:
        """Have leases and tickets live for another time; a connection's leases no shorter than the time it was given."""
        self._leases.change_ttl(ttl_ns)

    @property
    def leases(self) -> int:
        """Leases that live."""
        return len(self._leases)

    @property
    def tickets(self) -> int:
        """Tickets that may still be claimed."""
        return self._leases.tickets

    @property
    def has_backlog(self) -> bool:
        """Whether `expire` has more to end than it ends at once."""
        return self._leases.has_backlog or bool(self.ending)

    @property
    def holds(self) -> int:
        """Holds in the directory that are of leases and tickets, or are just being taken or ending."""
        taken = sum(len(task.holds) for task in self._acquiring)
        return self._leases.hold_count() + taken + len(self.ending)

    def stats(self, left_out: Collection[ConnectionId] = ()) -> dict[str, int]:
        """Counters, by name, without the leases of some connections."""
        leases = self.leases - sum(map(self._leases.count_of, left_out))
        return {"leases": leases, "tickets": self.tickets, "expired_leases": self._leases.expired_leases}

    def find(self, session: EngineSession, lease: int) -> Lease | None:
        """The lease, if it lives and is the session's."""
        return self._leases.find(lease, session.connection)

    def begin_task(
        self,
        session: EngineSession,
        runs: Sequence[Run],
        *,
        chunks: int,
        holder: ConnectionId | None = None,
        owner: str = "",
    ) -> HoldTask:
        """What a hit of `chunks` chunks needs, or as many leading ones as are stored (see `HoldTask`), to be taken in parts.
        `holder`: for whom it counts; None: the session's. `owner` names another node that may have more. Raises Refused."""
        self._check_room(session, holder)
        holds = hold_count(session, chunks) if session.groups else 0
        if holds > HOLDS_MAX:
            raise Refused(
                "full", f"{chunks} chunks of this layout's groups need {holds} holds, at most {HOLDS_MAX} are given"
            )
        task = HoldTask(
            self._directory,
            self._tiering,
            session,
            runs,
            holder=session.holder if holder is None else holder,
            ending=self.ending,
            chunks=chunks,
            owner=owner,
            waiting=self._waiting,
        )
        self._acquiring.add(task)
        return task

    def begin_set(self, session: EngineSession, group: int, keys: KeyColumn) -> SetTask:
        """What is there of these chunks of a group, each alone (see `SetTask`), to be taken in parts. Raises Refused."""
        self._check_room(session)
        task = SetTask(self._directory, self._tiering, session.parts[group], keys, ending=self.ending)
        self._acquiring.add(task)
        return task

    def hold_at_once(
        self, session: EngineSession, request: AnyHit, now_ns: int, *, holder: ConnectionId
    ) -> Taken | None:
        """Holds on all that a request asks for, which count for a holder. None where DRAM has not all of it, where it is not
        allowed, or is more than one turn's work: see `begin_task`. Raises Refused."""
        self._check_room(session, holder)
        if not 0 <= request.chunks <= LEAF_CHUNKS_MAX:
            return None
        found = self.desk.hold_hit(session.reader, request.keys, request.chunks, holder, now_ns)
        if found is None:
            return None
        holds, ranks = found.holds, session.layout.ranks
        of_rank = len(holds) // len(ranks)
        by_rank = {rank: holds[place * of_rank : (place + 1) * of_rank] for place, rank in enumerate(ranks)}
        return Taken(found.chunks, cast("HoldsByRank", by_rank), found.rows)

    def lease_at_once(self, session: EngineSession, request: AnyHit, now_ns: int) -> tuple[Lease, Leased] | None:
        """The same, as a lease; None too where the connection has all the leases that it may."""
        if not 0 <= request.chunks <= LEAF_CHUNKS_MAX:
            return None
        lease = self.desk.lease_hit(session.reader, request.keys, request.chunks, now_ns)
        if lease is None:
            return None
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        rows = self.desk.columns_of(session.reader, lease)
        return lease, Leased(lease.id, lease.chunks, rows.offsets, rows.generations, rows.levels, rows.slots)

    def take_holds(self, session: EngineSession, task: HoldTask) -> Taken:
        """What has been taken, for `grant` or `promise`, which is to follow at once."""
        chunks = task.chunks
        holds = task.take_holds() if chunks else {}
        return Taken(chunks, holds, sum(counts_of(session, chunks))) if holds else NOTHING_TAKEN

    def is_stored(self, session: EngineSession, keys: KeyColumn, chunk: int, now_ns: int) -> bool:
        """Whether a chunk of a session of one rank is in DRAM, or in a lower tier that can be read, whether or not it can be
        leased now. `keys`: of a chain from its root, or of chunks without a parent."""
        if chunk >= len(keys):
            return False
        (namespace,) = session.namespaces.values()
        key, parent = keys[chunk : chunk + 1], keys.before(chunk) if session.layout.is_chained else b""
        if self._directory.place_of(key[0])[1]:
            held = self._directory.acquire(namespace.id, key.packed, now_ns, parent)
            if held.chunks:
                self._directory.release(HoldId(held.id), now_ns)
            return bool(held.chunks)
        below = self._tiering.find(namespace, key, 0, parent=parent)
        self._tiering.give_up(below)
        return below is not None

    def grant(self, session: EngineSession, taken: Taken, now_ns: int) -> Leased:
        """A lease of what has been taken."""
        if not taken.chunks:
            return NOTHING
        grant = self._grant(session, taken, now_ns)
        self._note_hit(session, taken, now_ns)
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        return grant

    def grant_set(self, session: EngineSession, group: int, task: SetTask, now_ns: int) -> Leased:
        """A lease of what a task for a set has taken, with a row for each of its keys; `note_set` follows."""
        holds, places = task.take_holds(now_ns)
        lease = None
        if places:
            taken = Taken(len(places), holds, len(places), group)
            lease = self._make_lease(session, taken, now_ns)
        rows = self.desk.rows_by_key(session.reader, lease, places, task.count)
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        return Leased(
            0 if lease is None else lease.id, len(places), rows.offsets, rows.generations, rows.levels, rows.slots
        )

    def note_set(self, session: EngineSession, lease: int, now_ns: int) -> None:
        """A lease of a set was granted; nothing where it has ended, or there was none."""
        granted = self.find(session, lease)
        if granted is not None:
            self._note_hit(session, granted, now_ns)

    def promise(
        self, session: EngineSession, taken: Taken, now_ns: int, *, tickets: int, claims: int
    ) -> tuple[bytes, bytes]:
        """The first one of so many tickets on what has been taken for them, and the level of each chunk (see `Leased`); nothing
        where not all of them have room. `issue_another` makes the others. `claims`: as of `issue_ticket`."""
        if not taken.chunks:
            return b"", b""
        count, held = sum(map(len, taken.holds.values())), len(taken.holds) * taken.rows
        has_room = self._leases.has_room_for_tickets(session.connection, held, tickets)
        if not has_room or tickets * count > TICKETS_HOLDS_MAX:
            self.ending.release_holds(list(chain.from_iterable(taken.holds.values())), now_ns)
            return b"", b""
        levels = _worst([self._directory.columns(of_rank).levels for of_rank in taken.holds.values()])
        ticket = self._leases.issue_ticket(
            session.identity,
            session.connection,
            taken.chunks,
            taken.holds,
            now_ns=now_ns,
            rows=taken.rows,
            claims=claims,
        )
        self._note_hit(session, taken, now_ns)
        return ticket, levels

    def find_row(self, session: EngineSession, lease: Lease, row: int) -> tuple[HoldId, int, Layout] | None:
        """The hold of a row of a rank's lease, the chunk's index in it, and its layout; None where there is none."""
        for group, hold, size in holds_of(session, lease, session.layout.rank):
            if 0 <= row < size:
                return hold, row, group.layout
            row -= size
        return None

    def key_at(self, session: EngineSession, lease: Lease | Taken, chunk: int) -> bytes:
        """The key of a leased chunk on the first rank, of the group that names it; empty where the lease does not have it, or
        is of a set."""
        if lease.set_group is not None:
            return b""
        _, hold, size = holds_of(session, lease, session.layout.ranks[0])[naming_group(session)]
        row = chunk - (lease.chunks - size)  # a hold has the last ones
        return self._directory.key_of(hold, row) if 0 <= row < size else b""

    def release(self, session: EngineSession, lease: int, now_ns: int) -> None:
        """End a lease; nothing where it had ended before."""
        self.release_each(session, [lease], now_ns)

    def release_each(self, session: EngineSession, leases: Sequence[int], now_ns: int) -> None:
        """End leases; a bounded number of their holds at once."""
        failpoint.reach("daemon.release.before", failpoint.refused)
        if self.desk.release_leases(session.reader, leases, now_ns):
            self.ending.call_again()

    def renew(self, session: EngineSession, leases: list[int], now_ns: int) -> None:
        """Count leases as used now."""
        for lease in leases:
            self._leases.renew(lease, session.connection, now_ns)

    def issue_ticket(self, session: EngineSession, lease_id: int, now_ns: int, *, claims: int = 0) -> bytes:
        """A ticket on a lease, a hold of its own for each rank; empty where the lease has ended or is of a set, or there is no
        room. `claims`: how often it may be claimed; 0: once on each rank."""
        failpoint.reach("daemon.ticket.before_issue", failpoint.refused)
        lease = self.find(session, lease_id)
        if lease is None or lease.set_group is not None:
            return b""
        self._leases.renew(lease.id, session.connection, now_ns)
        return self._issue_ticket(session, lease, now_ns, claims)

    def issue_another(self, session: EngineSession, ticket: bytes, now_ns: int) -> bytes:
        """Another ticket on the chunks of one that nobody has claimed yet; empty where that has ended or there is no room."""
        entry = self._leases.find_ticket(ticket)
        return b"" if entry is None else self._issue_ticket(session, entry, now_ns, entry.claims)

    def _issue_ticket(self, session: EngineSession, of: Lease | TicketHold, now_ns: int, claims: int) -> bytes:
        has_room = self._leases.has_room_for_tickets(session.connection, of.held)
        holds = cast("HoldsByRank", of.holds)
        if not has_room or not self._can_hold(TICKETS, session, holds, of):
            return b""
        return self._leases.issue_ticket(
            session.identity,
            session.connection,
            of.chunks,
            self._duplicates(holds, TICKETS),
            now_ns=now_ns,
            rows=of.rows,
            claims=claims,
        )

    def end_tickets(self, tickets: Sequence[bytes], now_ns: int) -> None:
        """End tickets that nobody will claim; a bounded number of their holds at once."""
        lasting = [ticket for ticket in tickets if self._leases.find_ticket(ticket) is not None]
        self.ending.release_holds([hold for ticket in lasting for hold in self._leases.end_ticket(ticket)], now_ns)

    def claim(self, session: EngineSession, ticket: bytes, now_ns: int) -> Leased:
        """A lease from a ticket, for the session's rank, as often as it may be claimed; a scheduler, which has none, ends it.
        Raises Refused."""
        failpoint.reach("daemon.ticket.before_claim", failpoint.refused)
        entry = self._leases.find_ticket(ticket)
        rank = session.layout.rank
        if entry is None or entry.identity != session.identity:
            return NOTHING
        if rank is None:
            self.ending.release_holds(self._leases.end_ticket(ticket), now_ns)
            return NOTHING
        if rank not in entry.holds:
            return NOTHING
        self._check_room(session)
        held = {rank: entry.holds[rank]}
        if not self._can_hold(session.holder, session, held, entry):
            return NOTHING
        holds = self._duplicates(held, session.holder)
        if entry.claims > 1:
            entry.claims -= 1
        else:
            ended = self._leases.end_ticket(ticket) if entry.claims else self._leases.take_from_ticket(ticket, rank)
            self.ending.release_holds(ended, now_ns)
        return self._grant(session, Taken(entry.chunks, holds, entry.rows), now_ns)

    def join_peers(self, holder: ConnectionId) -> None:
        """What sessions of another node lease counts for all other nodes together too, from now on."""
        self._directory.join_user(holder, PEERS_USER)

    def leave_peers(self, holder: ConnectionId) -> None:
        """The last session of another node has ended."""
        self._directory.leave_user(holder)

    def drop_owner(self, connection: ConnectionId, now_ns: int) -> None:
        """End every lease of a connection; where there are many (`has_backlog`), `expire` ends the others."""
        self.ending.release_holds(self._leases.drop_owner(connection), now_ns)

    def expire(self, now_ns: int) -> None:
        """End leases and tickets that have expired or lost their connection, a bounded number."""
        self.ending.release_holds([], now_ns)
        if not self.ending:
            self.ending.release_holds(self._leases.expire(now_ns), now_ns)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Counts of each connection, by name."""
        return self._leases.count_by_owner()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._leases.verify() + (self._hit_curve.verify() if self._hit_curve is not None else [])

    def _note_hit(self, session: EngineSession, taken: Lease | Taken, now_ns: int) -> None:
        if self._hit_curve is None:
            return
        for number, rank in enumerate(taken.holds):
            for group, hold, _ in holds_of(session, taken, rank):
                self._hit_curve.note_lease([hold], group.chunk_sizes[number], now_ns)

    def _grant(self, session: EngineSession, taken: Taken, now_ns: int) -> Leased:
        """A lease with a row for each chunk of its holds; a scheduler's has the levels alone, the worst of the ranks'."""
        lease = self._make_lease(session, taken, now_ns)
        rows = self.desk.columns_of(session.reader, lease)
        return Leased(lease.id, lease.chunks, rows.offsets, rows.generations, rows.levels, rows.slots)

    def _make_lease(self, session: EngineSession, taken: Taken, now_ns: int) -> Lease:
        return self._leases.grant(
            session.connection,
            taken.chunks,
            taken.holds,
            now_ns,
            least_ttl_ns=session.lease_ttl_ns,
            rows=taken.rows,
            set_group=taken.set_group,
        )

    def _duplicates(self, holds: HoldsByRank, holder: int) -> dict[int, list[HoldId]]:
        """Further holds on the same chunks, which count for a holder."""
        made = {rank: self._directory.duplicate(of_rank) for rank, of_rank in holds.items()}
        for of_rank in made.values():
            self._directory.charge(of_rank, holder)
        return cast("dict[int, list[HoldId]]", made)  # without a call for each of thousands

    def _can_hold(self, holder: int, session: EngineSession, holds: HoldsByRank, of: Lease | TicketHold) -> bool:
        """Whether a holder may have these holds of a lease or ticket too."""
        by_size: dict[int, tuple[list[HoldId], list[int]]] = {}
        for rank in holds:
            for group, hold, size in holds_of(session, of, rank):
                these, classes = by_size.setdefault(size, ([], []))
                these.append(hold)
                classes.append(group.namespaces[rank].size_class)
        return all(
            self._directory.affordable(holder, these, classes, size) >= size
            for size, (these, classes) in by_size.items()
        )

    def _check_room(self, session: EngineSession, holder: ConnectionId | None = None) -> None:
        """Raises Refused. `holder`: whose the holds are to be; tickets are no leases."""
        if holder != TICKETS and self._leases.count_of(session.connection) >= self._leases_max:
            raise Refused("full", f"this connection has server.max_leases = {self._leases_max} leases")
        if not self._leases.has_room_for(session.connection):
            raise Refused("full", f"this connection's leases and tickets hold {HELD_CHUNKS_MAX} chunks or more")


def holds_of(
    session: EngineSession, of: Lease | TicketHold | Taken, rank: int | None
) -> list[tuple[EngineSession, HoldId, int]]:
    """A rank's holds of a lease or ticket in the order of its rows: each group's session, its hold, and how many chunks that
    has: the last ones of the hit. None where it has no such rank. Of a set one, of what is leased."""
    holds = cast("HoldsByRank", of.holds).get(rank, ()) if rank is not None else ()
    if not holds:
        return []
    if not isinstance(of, TicketHold) and of.set_group is not None:
        return [(session.parts[of.set_group], holds[0], of.rows)]
    return list(zip(session.parts, holds, counts_of(session, of.chunks), strict=True))


def namespaces_of(session: EngineSession, lease: Lease | Taken) -> list[tuple[Namespace, HoldId]]:
    """The hold of a session's lease in each namespace."""
    return [(group.namespaces[rank], hold) for rank in lease.holds for group, hold, _ in holds_of(session, lease, rank)]


def _worst(levels: Sequence[bytes]) -> bytes:
    """The slowest level of each chunk among the ranks'."""
    if len(levels) == 1:
        return levels[0]
    return bytes(map(max, *levels))
