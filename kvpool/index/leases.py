"""Leases and tickets: time-limited protection of chunks, by deadline.

A chunk with a live lease is never evicted or overwritten. A lease belongs to a connection and ends with it, when it
is released, or when it was not used for the time to live. A ticket is a hold of its own: it belongs to nobody, lasts
until every rank has claimed it or its time is over, whatever its issuer does.

Control thread only. `now_ns` is an argument everywhere: no clock is read here. The chunks themselves are protected by
holds in the native directory; this module says which holds exist for whom and hands back those that have to go.

Invariant: each hold id is in exactly one lease or ticket; `_of_owner` names exactly the leases in `_by_id`.
"""

import secrets
from dataclasses import dataclass, field

from kvpool.types import ConnectionId, HoldId, LeaseId

TICKET_BYTES = 32
TICKETS_MAX = 65536


@dataclass(slots=True)
class Lease:
    """A right to read `chunks` leading chunks; one hold for each rank it covers."""

    id: LeaseId
    owner: ConnectionId
    chunks: int
    holds: dict[int, HoldId]
    deadline_ns: int


@dataclass(slots=True)
class TicketHold:
    """What a ticket still holds: a hold for each rank that has not claimed it."""

    identity: tuple[str, bytes]
    chunks: int
    deadline_ns: int
    holds: dict[int, HoldId] = field(default_factory=dict)


class Leases:
    """All leases and tickets of the daemon."""

    def __init__(self, ttl_ns: int) -> None:
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns
        self._next_id = 1
        self._by_id: dict[LeaseId, Lease] = {}
        self._of_owner: dict[ConnectionId, set[LeaseId]] = {}
        self._tickets: dict[bytes, TicketHold] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def tickets(self) -> int:
        """Tickets that somebody may still claim."""
        return len(self._tickets)

    def count_of(self, owner: ConnectionId) -> int:
        """Leases of one connection."""
        return len(self._of_owner.get(owner, ()))

    def grant(self, owner: ConnectionId, chunks: int, holds: dict[int, HoldId], now_ns: int) -> Lease:
        """A new lease over `holds`, by rank."""
        assert chunks > 0
        assert holds
        lease = Lease(LeaseId(self._next_id), owner, chunks, holds, now_ns + self._ttl_ns)
        self._next_id += 1
        self._by_id[lease.id] = lease
        self._of_owner.setdefault(owner, set()).add(lease.id)
        return lease

    def find(self, lease_id: LeaseId, owner: ConnectionId) -> Lease | None:
        """The lease, if it lives and belongs to `owner`."""
        lease = self._by_id.get(lease_id)
        return lease if lease is not None and lease.owner == owner else None

    def renew(self, lease_id: LeaseId, owner: ConnectionId, now_ns: int) -> bool:
        """Count the lease as used now. False if it has ended or is another's."""
        lease = self.find(lease_id, owner)
        if lease is None:
            return False
        lease.deadline_ns = now_ns + self._ttl_ns
        return True

    def release(self, lease_id: LeaseId, owner: ConnectionId) -> list[HoldId]:
        """End a lease; the holds to release. Empty if it had ended before or is another's."""
        lease = self.find(lease_id, owner)
        return [] if lease is None else self._end(lease)

    def drop_owner(self, owner: ConnectionId) -> list[HoldId]:
        """End every lease of a connection; the holds to release."""
        leases = [self._by_id[lease_id] for lease_id in self._of_owner.get(owner, ())]
        return [hold for lease in leases for hold in self._end(lease)]

    def expire(self, now_ns: int) -> list[HoldId]:
        """End every lease and ticket whose time is over; the holds to release."""
        ended = [lease for lease in self._by_id.values() if lease.deadline_ns <= now_ns]
        holds = [hold for lease in ended for hold in self._end(lease)]
        for ticket in [token for token, entry in self._tickets.items() if entry.deadline_ns <= now_ns]:
            holds.extend(self._tickets.pop(ticket).holds.values())
        return holds

    @property
    def has_room_for_ticket(self) -> bool:
        """Whether another ticket may be issued."""
        return len(self._tickets) < TICKETS_MAX

    def issue_ticket(self, identity: tuple[str, bytes], chunks: int, holds: dict[int, HoldId], now_ns: int) -> bytes:
        """A new ticket over holds of its own. `identity` is what a claimer must share: model and layout but for the rank."""
        assert self.has_room_for_ticket
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = TicketHold(identity, chunks, now_ns + self._ttl_ns, holds)
        return ticket

    def find_ticket(self, ticket: bytes) -> TicketHold | None:
        """What a ticket holds; None for a used, expired or forged one."""
        return self._tickets.get(ticket)

    def take_from_ticket(self, ticket: bytes, rank: int) -> HoldId:
        """The hold of one rank, which leaves the ticket. The ticket ends with its last rank."""
        entry = self._tickets[ticket]
        hold = entry.holds.pop(rank)
        if not entry.holds:
            del self._tickets[ticket]
        return hold

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = []
        owned = {lease_id for lease_ids in self._of_owner.values() for lease_id in lease_ids}
        if owned != set(self._by_id):
            problems.append(f"leases: owners name {len(owned)} leases, {len(self._by_id)} exist")
        holds = [hold for lease in self._by_id.values() for hold in lease.holds.values()]
        holds += [hold for entry in self._tickets.values() for hold in entry.holds.values()]
        if len(holds) != len(set(holds)):
            problems.append("leases: a hold is in two leases or tickets")
        return problems

    def hold_count(self) -> int:
        """Holds that leases and tickets have in the directory."""
        in_leases = sum(len(lease.holds) for lease in self._by_id.values())
        return in_leases + sum(len(entry.holds) for entry in self._tickets.values())

    def _end(self, lease: Lease) -> list[HoldId]:
        del self._by_id[lease.id]
        owned = self._of_owner[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._of_owner[lease.owner]
        return list(lease.holds.values())
