"""Reservations: slots that a connection may write, until a deadline.

    OPEN ──commit of the last chunk / end / connection ends──► ended
      └──deadline──► EXPIRED ──end / connection ends──► ended

An expired reservation's slots are zombies: its writer may still write, so they are not reused until the connection has ended or
has acknowledged that it no longer writes. Where the daemon itself copies into the slots, a reservation ends when no such copy
is under way. Control thread only; no clock is read here.

Plain saves begin and mostly end in the native table, where requests find them; one that is looked for here is here from then
on.

Invariant: `_of_owner` names exactly the reservations in `_by_id`, and `plain` counts them; a save is in one of the two tables;
no number of a slot holder is in two of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.ids import NUMBER_MAX, ConnectionId, ReservationId, SaveId
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import StagedSlots
from kvpool.layout import Layout

# A writer on a busy machine may get no processor time for a while: one that is later than this is not just slow.
OVERDUE_NS_MIN = 5 * NS_PER_S


@dataclass(slots=True)
class ReservedRun:
    """What is reserved of a run of chunks of a group, whose `session` it is: `chunks` slots, of which the first `committed` are
    published. `extents` checksums belong to a chunk, the first `kv_extents` of them to its KV.

    `holders`: who has the slots: the directory's reservation of a chain or one for each chunk, or with `is_part` the part of a
    joint save. `staged`: what the daemon has copied into them, where it does that itself. `is_chain`: its chunks follow each
    other, and a commit may give their token ids.
    """

    session: EngineSession
    chunks: int
    extents: int
    kv_extents: int
    holders: list[ReservationId]
    is_part: bool = False
    is_chain: bool = True
    staged: StagedSlots | None = None
    committed: int = 0

    @property
    def layout(self) -> Layout:
        """Layout of its chunks."""
        return self.session.layout

    def slices(self, first: int, end: int) -> list[tuple[ReservationId, int, int]]:
        """The holders of the chunks from `first` up to `end`, each with the first of them that it has, counted among its own,
        and their number."""
        if len(self.holders) == 1:
            return [(self.holders[0], first, end - first)]
        return [(holder, 0, 1) for holder in self.holders[first:end]]


@dataclass(slots=True)
class Reservation:
    """`runs`: of one save, in the order in which they are committed. `copies` of the daemon's own are under way. `is_reported`:
    a commit has been answered that it has expired."""

    id: SaveId
    owner: ConnectionId
    runs: list[ReservedRun]
    deadline_ns: int
    is_expired: bool = False
    copies: int = 0
    is_ending: bool = False
    is_reported: bool = False
    chunks: int = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = sum([run.chunks for run in self.runs])

    @property
    def committed(self) -> int:
        """Chunks that are published."""
        return sum([run.committed for run in self.runs])

    @property
    def first_slots(self) -> ReservationId | None:
        """The first of the directory's reservations of its chunks; None where parts alone were reserved."""
        return next((run.holders[0] for run in self.runs if run.holders and not run.is_part), None)

    def slots(self) -> Iterator[tuple[ReservationId, int]]:
        """The directory's reservations of its chunks, each with the number of these, in the order in which they end: of a set
        of chunks the first one ends, and so is used, last; of windows the last one."""
        for run in self.runs:
            if run.is_part:
                continue
            alone = len(run.holders) == run.chunks
            holders = reversed(run.holders) if not run.is_chain and run.layout.is_chained else run.holders
            yield from zip(holders, repeat(1 if alone else run.chunks))


class Reservations:
    """All reservations of the daemon."""

    def __init__(self, ttl_ns: int) -> None:
        assert ttl_ns > 0
        self._ttl_ns = self._longest_ttl_ns = ttl_ns
        self.plain = kvpool_native.PlainSaves(ttl_ns)
        self._writers: dict[ConnectionId, EngineSession] = {}  # those that may have plain saves
        self._by_id: dict[SaveId, Reservation] = {}
        self._of_owner: dict[ConnectionId, set[SaveId]] = {}

    def __len__(self) -> int:
        return len(self._by_id) + len(self.plain)

    def join(self, session: EngineSession) -> None:
        """A session may have plain saves from now on, until `of_owner` ends them."""
        self._writers[session.connection] = session

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of reservations made from now on."""
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns
        self.plain.change_ttl(ttl_ns)
        self._longest_ttl_ns = max(ttl_ns, self._longest_ttl_ns)

    def count_of(self, owner: ConnectionId) -> int:
        """Reservations of one connection."""
        return self.plain.count_of(owner)

    def add_reservation(self, owner: ConnectionId, runs: list[ReservedRun], now_ns: int) -> SaveId:
        """Remember what was reserved for a save: at least a chunk."""
        made = Reservation(SaveId(self.plain.new_id()), owner, runs, now_ns + self._ttl_ns)
        assert made.chunks > 0
        self._add(made)
        return made.id

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Reservations of each connection."""
        return {ConnectionId(owner): {"reservations": saves} for owner, saves in self.plain.owners()}

    def overdue(self, now_ns: int) -> set[ConnectionId]:
        """Connections with a reservation that expired a whole time to live ago and was not ended: a writer ends its own when
        the time is over that it was welcomed with."""
        grace_ns = max(self._longest_ttl_ns, OVERDUE_NS_MIN)
        return {
            entry.owner
            for entry in self._by_id.values()
            if entry.is_expired and not entry.copies and entry.deadline_ns + grace_ns <= now_ns
        }

    def find(self, reservation_id: SaveId, owner: ConnectionId) -> Reservation | None:
        """The reservation, if it exists and belongs to `owner`. Any number may be asked for."""
        reservation = self._by_id.get(reservation_id)
        if reservation is None:
            if not 0 < reservation_id <= NUMBER_MAX:
                return None
            plain = self.plain.take(reservation_id, owner)
            return None if plain is None else self._adopt(plain)
        return reservation if reservation.owner == owner else None

    def remove_reservation(self, reservation: Reservation) -> None:
        """Remove a reservation; the caller ends what it holds."""
        del self._by_id[reservation.id]
        self.plain.count_others(reservation.owner, -1)
        owned = self._of_owner[reservation.owner]
        owned.discard(reservation.id)
        if not owned:
            del self._of_owner[reservation.owner]

    def holders(self) -> set[ReservationId]:
        """The numbers of all that have slots for them."""
        plain = {ReservationId(holder) for holder in self.plain.holders()}
        return plain | {holder for entry in self._by_id.values() for run in entry.runs for holder in run.holders}

    def of_owner(self, owner: ConnectionId) -> list[Reservation]:
        """Every reservation of a connection, which has no plain saves any more."""
        for plain in self.plain.take_owner(owner):
            self._adopt(plain)
        self._writers.pop(owner, None)
        return [self._by_id[reservation_id] for reservation_id in self._of_owner.get(owner, ())]

    def expire(self, now_ns: int) -> list[Reservation]:
        """Mark and return the reservations whose deadline has passed now; the caller makes their slots zombies."""
        for plain in self.plain.take_expired(now_ns):
            self._adopt(plain)
        due = [entry for entry in self._by_id.values() if not entry.is_expired and entry.deadline_ns <= now_ns]
        for reservation in due:
            reservation.is_expired = True
        return due

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        owned = {entry for entries in self._of_owner.values() for entry in entries}
        if owned != set(self._by_id):
            return [f"reservations: owners name {len(owned)}, {len(self._by_id)} exist"]
        holders = len(self.plain.holders()) + sum(
            len(run.holders) for entry in self._by_id.values() for run in entry.runs
        )
        problems = self.plain.verify()
        if sum(saves for _, saves in self.plain.owners()) != len(self):
            problems.append("reservations: those of the connections are miscounted")
        problems += [
            f"reservation {entry.id}: {entry.committed} of {entry.chunks} chunks committed"
            for entry in self._by_id.values()
            if entry.committed >= entry.chunks
        ]
        if holders != len(self.holders()):
            problems.append("reservations: something that has slots is in two of them")
        return problems

    def _add(self, made: Reservation) -> None:
        self._by_id[made.id] = made
        self._of_owner.setdefault(made.owner, set()).add(made.id)
        self.plain.count_others(made.owner, 1)

    def _adopt(self, plain: kvpool_native.PlainSave) -> Reservation:
        """A save that was taken out of the native table is here from now on."""
        owner = ConnectionId(plain.owner)
        session = self._writers[owner].of_group(plain.group)
        layout = session.layout
        run = ReservedRun(
            session,
            plain.chunks,
            layout.extents,
            layout.kv_extents,
            [ReservationId(holder) for holder in plain.holders],
            is_chain=plain.is_chain,
            committed=plain.committed,
        )
        adopted = Reservation(SaveId(plain.id), owner, [run], plain.deadline_ns)
        self._add(adopted)
        return adopted
