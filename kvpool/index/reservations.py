"""Reservations: slots that a connection may write, until a deadline.

    OPEN ──commit of the last chunk / end / connection ends──► ended
      └──deadline──► EXPIRED ──end / connection ends──► ended

An expired reservation's slots are zombies: its writer may still write, so they are not reused until the connection has ended or
has acknowledged that it no longer writes. Where the daemon itself copies into the slots, a reservation ends when no such copy
is under way. Control thread only; no clock is read here.

Invariant: `_of_owner` names exactly the reservations in `_by_id`.
"""

from dataclasses import dataclass

from kvpool.clock import NS_PER_S
from kvpool.index.staged_slots import StagedSlots
from kvpool.layout import Layout
from kvpool.types import ConnectionId, ReservationId

# A writer on a busy machine may get no processor time for a while: one that is later than this is not just slow.
OVERDUE_NS_MIN = 5 * NS_PER_S


@dataclass(slots=True)
class Reservation:
    """`chunks` reserved slots, of which the first `committed` are published. `extents` checksums belong to a chunk, the
    first `kv_extents` of them to its KV; `layout`: of the chunks, where their owner saves those of several groups.

    `staged`: what the daemon has copied into them, where it does that itself; `copies` of its own are under way. `is_part`: of
    a joint save, whose slots are not its own: the directory does not know its number. `is_reported`: a commit has been answered
    that it has expired.
    """

    id: ReservationId
    owner: ConnectionId
    chunks: int
    extents: int
    kv_extents: int
    deadline_ns: int
    committed: int = 0
    is_expired: bool = False
    staged: StagedSlots | None = None
    copies: int = 0
    is_ending: bool = False
    layout: Layout | None = None
    is_part: bool = False
    is_reported: bool = False


class Reservations:
    """All reservations of the daemon, by the number that the directory gave them; parts by their own."""

    def __init__(self, ttl_ns: int) -> None:
        assert ttl_ns > 0
        self._ttl_ns = self._longest_ttl_ns = ttl_ns
        self._by_id: dict[ReservationId, Reservation] = {}
        self._of_owner: dict[ConnectionId, set[ReservationId]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of reservations made from now on."""
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns
        self._longest_ttl_ns = max(ttl_ns, self._longest_ttl_ns)

    def count_of(self, owner: ConnectionId) -> int:
        """Reservations of one connection."""
        return len(self._of_owner.get(owner, ()))

    def add(
        self,
        reservation_id: ReservationId,
        owner: ConnectionId,
        *,
        chunks: int,
        extents: int,
        kv_extents: int,
        now_ns: int,
        staged: StagedSlots | None = None,
        layout: Layout | None = None,
        is_part: bool = False,
    ) -> None:
        """Remember a reservation that the directory has made, or a part of a joint save."""
        assert chunks > 0
        assert reservation_id not in self._by_id
        deadline_ns = now_ns + self._ttl_ns
        self._by_id[reservation_id] = Reservation(
            reservation_id,
            owner,
            chunks,
            extents,
            kv_extents,
            deadline_ns,
            staged=staged,
            layout=layout,
            is_part=is_part,
        )
        self._of_owner.setdefault(owner, set()).add(reservation_id)

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Reservations of each connection."""
        return {owner: {"reservations": len(made)} for owner, made in self._of_owner.items()}

    def overdue(self, now_ns: int) -> set[ConnectionId]:
        """Connections with a reservation that expired a whole time to live ago and was not ended: a writer ends its own when
        the time is over that it was welcomed with."""
        grace_ns = max(self._longest_ttl_ns, OVERDUE_NS_MIN)
        return {
            entry.owner
            for entry in self._by_id.values()
            if entry.is_expired and not entry.copies and entry.deadline_ns + grace_ns <= now_ns
        }

    def find(self, reservation_id: ReservationId, owner: ConnectionId) -> Reservation | None:
        """The reservation, if it exists and belongs to `owner`."""
        reservation = self._by_id.get(reservation_id)
        return reservation if reservation is not None and reservation.owner == owner else None

    def end(self, reservation: Reservation) -> None:
        """Remove a reservation; the caller ends it in the directory."""
        del self._by_id[reservation.id]
        owned = self._of_owner[reservation.owner]
        owned.discard(reservation.id)
        if not owned:
            del self._of_owner[reservation.owner]

    def ids(self) -> set[ReservationId]:
        """The numbers of all reservations."""
        return set(self._by_id)

    def of_owner(self, owner: ConnectionId) -> list[Reservation]:
        """Every reservation of a connection."""
        return [self._by_id[reservation_id] for reservation_id in self._of_owner.get(owner, ())]

    def expire(self, now_ns: int) -> list[Reservation]:
        """Mark and return the reservations whose deadline has passed now; the caller makes their slots zombies."""
        due = [entry for entry in self._by_id.values() if not entry.is_expired and entry.deadline_ns <= now_ns]
        for reservation in due:
            reservation.is_expired = True
        return due

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        owned = {entry for entries in self._of_owner.values() for entry in entries}
        if owned != set(self._by_id):
            return [f"reservations: owners name {len(owned)}, {len(self._by_id)} exist"]
        return [
            f"reservation {entry.id}: {entry.committed} of {entry.chunks} chunks committed"
            for entry in self._by_id.values()
            if entry.committed >= entry.chunks
        ]
