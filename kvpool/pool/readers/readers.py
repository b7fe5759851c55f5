"""Readers: leases and tickets on stored chunks, over the holds of the native directory.

Joins the directory, which protects chunks, with the records of owners and deadlines. It schedules nothing and handles no
protocol; `now_ns` is an argument. Control thread only.

Invariant: every hold that a reader has in the directory is in exactly one lease or ticket, is just being taken for one, or is
just ending. Those of leases and tickets count there for the connection of the lease, or for all tickets together: these may
outlive their issuers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.errors import Refused
from kvpool.index.leases import HELD_CHUNKS_MAX, Lease, Leases, TicketHold
from kvpool.index.miss_ratio_curve import MissRatioCurve
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.readers.acquire_task import AcquireTask
from kvpool.pool.readers.chains_task import Chain, ChainsTask
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.pool.readers.group_task import GroupTask, WaitingGroups, chains_of, hold_count, place_of
from kvpool.pool.readers.hold_bounds import PEERS_USER
from kvpool.protocol.records.groups import HOLDS_MAX
from kvpool.tiering.tiering import Tiering
from kvpool.types import ConnectionId, HoldId, LeaseId


class Grant(NamedTuple):
    """A lease as its holder sees it: columns of u64 offsets and generations, u8 tiers, u64 slots. `lease` 0: nothing."""

    lease: int
    chunks: int
    offsets: bytes
    generations: bytes
    tiers: bytes
    slots: bytes


# The owner number of tickets' holds: no connection has it.
TICKETS = 0
NOTHING = Grant(lease=0, chunks=0, offsets=b"", generations=b"", tiers=b"", slots=b"")


class Readers:
    """All readers of the daemon. `leases_max` bounds the leases of one connection."""

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
        self._acquiring: WeakSet[AcquireTask | ChainsTask | GroupTask] = WeakSet()
        self._waiting_groups: WaitingGroups = {}
        self._ending = EndingHolds(directory, on_backlog)

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
        return self._leases.has_backlog or bool(self._ending)

    @property
    def holds(self) -> int:
        """Holds in the directory that are of leases and tickets, or are just being taken or ending."""
        taken = sum(len(acquire_task.holds) for acquire_task in self._acquiring)
        return self._leases.hold_count() + taken + len(self._ending)

    def leased(self) -> Iterator[HoldId]:
        """The holds of the leases that live now."""
        return iter(self._leases.holds())

    def stats(self, left_out: Collection[ConnectionId] = ()) -> dict[str, int]:
        """Counters, by name, without the leases of some connections."""
        leases = self.leases - sum(map(self._leases.count_of, left_out))
        return {"leases": leases, "tickets": self.tickets, "expired_leases": self._leases.expired_leases}

    def find(self, session: EngineSession, lease: int) -> Lease | None:
        """The lease, if it lives and is the session's."""
        return self._leases.find(LeaseId(lease), session.connection)

    def begin(self, session: EngineSession, keys: KeyColumn, owner: str = "") -> AcquireTask:
        """A lease of the longest present prefix of `keys`, on every rank, to be taken in parts; `owner` names another node that
        may have more. Raises Refused."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        self._check_room(session)
        acquire_task = AcquireTask(self._directory, self._tiering, session, keys, holder=session.holder, owner=owner)
        self._acquiring.add(acquire_task)
        return acquire_task

    def grant(self, session: EngineSession, acquire_task: AcquireTask, now_ns: int) -> Grant:
        """A lease of what has been taken."""
        return self._grant_acquired(session, acquire_task.chunks, list(acquire_task.take()), now_ns)

    def begin_groups(self, session: EngineSession, keys: list[KeyColumn], chunks: int) -> GroupTask:
        """A lease of what a hit of `chunks` chunks needs of every group, to be taken in parts. Raises Refused."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        self._check_room(session)
        holds = hold_count(session, chunks)
        if holds > HOLDS_MAX:
            raise Refused(
                "full", f"{chunks} chunks of this layout's groups need {holds} holds, at most {HOLDS_MAX} are given"
            )
        group_task = GroupTask(
            self._directory, self._tiering, session, keys, chunks=chunks, waiting=self._waiting_groups
        )
        self._acquiring.add(group_task)
        return group_task

    def grant_groups(self, session: EngineSession, group_task: GroupTask, now_ns: int) -> Grant:
        """A lease of what has been taken; nothing unless all of it was."""
        if not group_task.is_whole():
            return NOTHING
        holds, sizes = group_task.take()
        if self._hit_curve is not None:
            chains = chains_of(session, group_task.chunks)
            sizes_of = [one for chain in chains for one in chain.chunk_sizes]
            self._hit_curve.note_lease(list(zip(holds.values(), sizes_of, strict=True)), now_ns)
        grant = self._grant(session, group_task.chunks, holds, now_ns, sizes=sizes)
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        return grant

    def begin_run(self, session: EngineSession, keys: KeyColumn) -> ChainsTask:
        """A lease of the leading ones of chunks without a parent, to be taken in parts, for a session of one rank. Raises
        Refused."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        self._check_room(session)
        run_task = ChainsTask(self._directory, self._tiering, session, [Chain(session, key) for key in keys.parts(1)])
        self._acquiring.add(run_task)
        return run_task

    def grant_run(self, session: EngineSession, run_task: ChainsTask, now_ns: int) -> Grant:
        """A lease of the leading chunks that have been taken and are still whole, a hold each."""
        chunks = run_task.count_whole()
        if not chunks:
            return NOTHING
        held = [hold for (hold,) in run_task.take(chunks)]
        if self._hit_curve is not None:
            self._hit_curve.note_lease([(hold, session.chunk_sizes[0]) for hold in held], now_ns)
        (rank,) = session.layout.ranks
        holds = {position * session.layout.world + rank: hold for position, hold in enumerate(held)}
        grant = self._grant(session, chunks, holds, now_ns, sizes=dict.fromkeys(holds, 1))
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        return grant

    def acquire(self, session: EngineSession, keys: KeyColumn, now_ns: int, *, may_wait: bool) -> Grant | None:
        """All parts at once. None where DRAM has no room for all that a lower tier has (and `may_wait`). Raises Refused."""
        acquire_task = self.begin(session, keys)
        while (step := acquire_task.advance(now_ns)) is Step.MORE:
            pass
        if step is Step.WAIT and may_wait:
            acquire_task.end(now_ns)
            return None
        return self.grant(session, acquire_task, now_ns)

    def acquire_leaves(self, session: EngineSession, leaves: KeyColumn, chunks: int, now_ns: int) -> Grant:
        """Lease the `chunks` chunks that end in `leaves`, one key for each rank: all of them or nothing. Raises Refused."""
        failpoint.reach("daemon.acquire.before_hold", failpoint.refused)
        self._check_room(session)
        held = self._directory.acquire_leaves(session.namespace_ids, leaves.packed, chunks, now_ns)
        if self._affordable(session.holder, session, held.ids, held.chunks) < held.chunks:
            self._ending.end([HoldId(hold) for hold in held.ids], now_ns)
            return NOTHING
        return self._grant_acquired(session, held.chunks, held.ids, now_ns)

    def find_row(self, session: EngineSession, lease: Lease, row: int) -> tuple[HoldId, int, Layout] | None:
        """The hold of a row of a rank's lease, the chunk's index in it, and its layout; None where there is none."""
        for chain, hold, size in self.holds_of(session, lease):
            if 0 <= row < size:
                return hold, row, chain.layout
            row -= size
        return None

    def holds_of(self, session: EngineSession, lease: Lease) -> list[tuple[EngineSession, HoldId, int]]:
        """The holds of a rank's lease in the order of its rows, each with its group's session and how many chunks it has."""
        chains, world = chains_of(session, lease.chunks), session.layout.world
        return [
            (chains[number // world], hold, lease.sizes.get(number, lease.chunks))
            for number, hold in _of_rank(session.layout.rank, lease.holds, world).items()
        ]

    def key_at(self, session: EngineSession, lease: Lease, chunk: int) -> bytes:
        """The key of a leased chunk on the first rank, of the group that names it; empty where the lease does not have it."""
        place = place_of(session, lease.chunks, chunk) if chunk < lease.chunks else None
        if place is None:
            return b""
        position, index = place
        number = position * session.layout.world + session.layout.ranks[0]
        return self._directory.key_of(lease.holds[number], index)

    def release(self, session: EngineSession, lease: int, now_ns: int) -> None:
        """End a lease; nothing where it had ended before."""
        self.release_each(session, [lease], now_ns)

    def release_each(self, session: EngineSession, leases: Sequence[int], now_ns: int) -> None:
        """End leases; a bounded number of their holds at once."""
        holds: list[HoldId] = []
        for lease in leases:
            failpoint.reach("daemon.release.before", failpoint.refused)
            holds += self._leases.release(LeaseId(lease), session.connection)
        self._ending.end(holds, now_ns)

    def renew(self, session: EngineSession, leases: list[int], now_ns: int) -> None:
        """Count leases as used now."""
        for lease in leases:
            self._leases.renew(LeaseId(lease), session.connection, now_ns)

    def issue_ticket(self, session: EngineSession, lease_id: int, now_ns: int, *, claims: int = 0) -> bytes:
        """A ticket on a lease, a hold of its own for each rank; empty where the lease has ended or there is no room. `claims`:
        how often it may be claimed; 0: once on each rank."""
        failpoint.reach("daemon.ticket.before_issue", failpoint.refused)
        lease = self.find(session, lease_id)
        if lease is None or not self._leases.has_room_for_ticket(lease.owner, lease.held):
            return b""
        self._leases.renew(lease.id, session.connection, now_ns)
        if not self._can_hold(TICKETS, session, lease.holds, lease):
            return b""
        holds = {rank: HoldId(self._directory.duplicate(hold)) for rank, hold in lease.holds.items()}
        self._directory.charge(list(holds.values()), TICKETS)
        return self._leases.issue_ticket(
            session.identity, lease.owner, lease.chunks, holds, now_ns=now_ns, sizes=lease.sizes, claims=claims
        )

    def claim(self, session: EngineSession, ticket: bytes, now_ns: int) -> Grant:
        """A lease from a ticket, for the session's rank, as often as it may be claimed; a scheduler, which has none, ends it.
        Raises Refused."""
        failpoint.reach("daemon.ticket.before_claim", failpoint.refused)
        entry = self._leases.find_ticket(ticket)
        rank = session.layout.rank
        if entry is None or entry.identity != session.identity:
            return NOTHING
        if rank is None:
            self._ending.end(self._leases.end_ticket(ticket), now_ns)
            return NOTHING
        held = _of_rank(rank, entry.holds, session.layout.world)
        if not held:
            return NOTHING
        self._check_room(session)
        if not self._can_hold(session.holder, session, held, entry):
            return NOTHING
        holds = {number: HoldId(self._directory.duplicate(hold)) for number, hold in held.items()}
        if entry.claims > 1:
            entry.claims -= 1
        else:
            taken = held if not entry.claims else list(entry.holds)
            for hold in [self._leases.take_from_ticket(ticket, number) for number in taken]:
                self._directory.release(hold, now_ns)
        sizes = {number: size for number, size in entry.sizes.items() if number in held}
        return self._grant(session, entry.chunks, holds, now_ns, sizes=sizes)

    def join_peers(self, holder: ConnectionId) -> None:
        """What sessions of another node lease counts for all other nodes together too, from now on."""
        self._directory.join_user(holder, PEERS_USER)

    def leave_peers(self, holder: ConnectionId) -> None:
        """The last session of another node has ended."""
        self._directory.leave_user(holder)

    def drop_owner(self, connection: ConnectionId, now_ns: int) -> None:
        """End every lease of a connection; where there are many (`has_backlog`), `expire` ends the others."""
        self._ending.end(self._leases.drop_owner(connection), now_ns)

    def expire(self, now_ns: int) -> None:
        """End leases and tickets that have expired or lost their connection, a bounded number."""
        self._ending.end([], now_ns)
        if not self._ending:
            self._ending.end(self._leases.expire(now_ns), now_ns)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Counts of each connection, by name."""
        return self._leases.count_by_owner()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._leases.verify() + (self._hit_curve.verify() if self._hit_curve is not None else [])

    def _grant_acquired(self, session: EngineSession, chunks: int, holds: list[int], now_ns: int) -> Grant:
        if not chunks:
            return NOTHING
        if self._hit_curve is not None:
            self._hit_curve.note_lease(list(zip(map(HoldId, holds), session.chunk_sizes, strict=True)), now_ns)
        by_rank = {rank: HoldId(hold) for rank, hold in zip(session.namespaces, holds, strict=True)}
        grant = self._grant(session, chunks, by_rank, now_ns)
        failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
        return grant

    def _grant(
        self,
        session: EngineSession,
        chunks: int,
        holds: dict[int, HoldId],
        now_ns: int,
        *,
        sizes: Mapping[int, int] | None = None,
    ) -> Grant:
        lease = self._leases.grant(
            session.connection, chunks, holds, now_ns, least_ttl_ns=session.lease_ttl_ns, sizes=sizes
        )
        self._directory.charge(list(holds.values()), session.holder)
        if session.groups or lease.sizes:
            return self._grant_rows(session, lease)
        rank = session.layout.rank
        if rank is None:
            levels = [np.frombuffer(self._directory.columns(hold).levels, np.uint8) for hold in holds.values()]
            return Grant(lease.id, chunks, b"", b"", np.maximum.reduce(levels).tobytes(), b"")
        columns = self._directory.columns(holds[rank])
        return Grant(lease.id, chunks, columns.offsets, columns.generations, columns.levels, columns.slots)

    def _grant_rows(self, session: EngineSession, lease: Lease) -> Grant:
        """A lease with the rows of each hold; a scheduler's has the levels alone, the worst of the ranks'."""
        rows = [
            [self._directory.columns(hold) for hold in _of_rank(rank, lease.holds, session.layout.world).values()]
            for rank in session.layout.ranks
        ]
        levels = [np.frombuffer(b"".join(one.levels for one in columns), np.uint8) for columns in rows]
        if session.layout.rank is None:
            return Grant(lease.id, lease.chunks, b"", b"", np.maximum.reduce(levels).tobytes(), b"")
        (columns,) = rows
        return Grant(
            lease.id,
            lease.chunks,
            b"".join(one.offsets for one in columns),
            b"".join(one.generations for one in columns),
            levels[0].tobytes(),
            b"".join(one.slots for one in columns),
        )

    def _can_hold(
        self, holder: int, session: EngineSession, holds: Mapping[int, HoldId], of: Lease | TicketHold
    ) -> bool:
        """Whether a holder may have these holds of a lease or ticket too."""
        chains, world = chains_of(session, of.chunks), session.layout.world
        by_size: dict[int, list[tuple[int, int]]] = {}
        for number, hold in holds.items():
            size_class = chains[number // world].namespaces[number % world].size_class
            by_size.setdefault(of.sizes.get(number, of.chunks), []).append((hold, size_class))
        return all(
            self._directory.affordable(holder, [hold for hold, _ in these], [one for _, one in these], size) >= size
            for size, these in by_size.items()
        )

    def _affordable(self, holder: int, session: EngineSession, holds: Sequence[int], chunks: int) -> int:
        return self._directory.affordable(holder, holds, session.size_classes, chunks)

    def _check_room(self, session: EngineSession) -> None:
        if self._leases.count_of(session.connection) >= self._leases_max:
            raise Refused("full", f"this connection has server.max_leases = {self._leases_max} leases")
        if not self._leases.has_room_for(session.connection):
            raise Refused("full", f"this connection's leases and tickets hold {HELD_CHUNKS_MAX} chunks or more")


def namespaces_of(session: EngineSession, lease: Lease) -> list[tuple[Namespace, HoldId]]:
    """The holds of a session's lease, each with the namespace of its chunks."""
    chains, world = chains_of(session, lease.chunks), session.layout.world
    return [(chains[number // world].namespaces[number % world], hold) for number, hold in lease.holds.items()]


def _of_rank(rank: int | None, holds: Mapping[int, HoldId], world: int) -> dict[int, HoldId]:
    """A rank's holds of a lease or ticket, by number, in the order of the lease's rows."""
    return {number: hold for number, hold in holds.items() if number % world == rank}
