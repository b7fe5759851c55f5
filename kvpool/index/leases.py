"""Leases and tickets: time-limited protection of chunks, by deadline.

A chunk with a live lease is never evicted or overwritten. A lease belongs to a connection and ends with it, when it
is released, or when it was not used for its time to live. A ticket is a hold of its own: it belongs to no connection and lasts
until every rank has claimed it, or as many claims as it was issued for have come, or it expires, even if its issuer ends.

Control thread only. `now_ns` is an argument everywhere: no clock is read here. The chunks themselves are protected by
holds in the native directory; this module records which holds exist for whom and returns those to release: a bounded number at
a time, because ending all holds of one connection may take a tenth of a second.

Invariant: each hold id is in exactly one lease or ticket; `_of_owner` names exactly the leases in `_by_id`, and so does
`_order`; `_ticket_order` names the tickets;
`_held_chunks` counts the chunks of every hold by the connection that asked for it, `_ticket_chunks` those of tickets;
`_issued` has each ticket once.
"""

import secrets
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from kvpool.ids import TICKET_BYTES, ConnectionId, HoldId, LeaseId
from kvpool.index.deadline_order import DeadlineOrder

TICKETS_MAX = 65536
# A hold costs 4 bytes for each chunk: 16 MiB for a connection, 64 MiB for tickets, which outlive theirs. It costs some 220 for
# itself: where each chunk is a hold of its own, as of windows and states, 0.9 and 3.5 GiB.
HELD_CHUNKS_MAX = 4 << 20
TICKET_CHUNKS_MAX = 16 << 20
# Chunks released in one call: about a quarter of a millisecond. A lease or ticket itself costs as much as some chunks.
ENDED_AT_ONCE = 4096
ENDED_COST = 64


# The holds of each rank, in the order of a lease's rows.
HoldsByRank = Mapping[int, Sequence[HoldId]]


@dataclass(slots=True)
class Lease:
    """A right to read `chunks` leading chunks: for each rank it covers one hold, and several where the layout has groups, or is
    one of chunks without a parent.

    `least_ttl_ns`: the time to live that its owner was given. `rows`: chunks of the holds of one rank together.
    """

    id: LeaseId
    owner: ConnectionId
    chunks: int
    holds: HoldsByRank
    rows: int
    least_ttl_ns: int
    held: int  # chunks of all its holds together


@dataclass(slots=True)
class TicketHold:
    """Holds of a ticket: those of each rank that has not claimed it. `rows`: as in a lease.

    `claims`: how many more claims of whatever ranks it is for, which leave it its holds; 0: one of each rank.
    """

    identity: tuple[str, bytes]
    issuer: ConnectionId
    chunks: int
    holds: dict[int, Sequence[HoldId]]
    rows: int
    claims: int = 0

    @property
    def held(self) -> int:
        """Chunks of all its holds together."""
        return len(self.holds) * self.rows


class Leases:
    """All leases and tickets of the daemon."""

    def __init__(self, ttl_ns: int) -> None:
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns
        self._next_id = 1
        self._by_id: dict[LeaseId, Lease] = {}
        self._order: DeadlineOrder[LeaseId] = DeadlineOrder()
        self._of_owner: dict[ConnectionId, set[LeaseId]] = {}
        self._leaving: deque[ConnectionId] = deque()  # their leases are being ended
        self._tickets: dict[bytes, TicketHold] = {}
        self._ticket_order: DeadlineOrder[bytes] = DeadlineOrder()
        self._issued: Counter[ConnectionId] = Counter()  # tickets of each issuer
        self._held_chunks: dict[ConnectionId, int] = {}
        self._ticket_chunks = 0
        self.expired_leases = 0
        self.has_backlog = False  # there is more to end: call `expire` again soon

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def tickets(self) -> int:
        """Tickets that may still be claimed."""
        return len(self._tickets)

    def count_of(self, owner: ConnectionId) -> int:
        """Leases of one connection."""
        return len(self._of_owner.get(owner, ()))

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of leases from their next use on, and of tickets that are issued from now on."""
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns

    def grant(
        self,
        owner: ConnectionId,
        chunks: int,
        holds: HoldsByRank,
        now_ns: int,
        *,
        least_ttl_ns: int = 0,
        rows: int | None = None,
    ) -> Lease:
        """A new lease over `holds`. `rows`: of each rank; None: `chunks`."""
        assert chunks > 0
        assert holds
        lease_id = LeaseId(self._next_id)
        rows = chunks if rows is None else rows
        held = len(holds) * rows
        lease = Lease(lease_id, owner, chunks, holds, rows, least_ttl_ns, held)
        self._next_id += 1
        self._held_chunks[owner] = self._held_chunks.get(owner, 0) + held
        self._by_id[lease_id] = lease
        ttl_ns = self._ttl_ns
        self._order.use(lease_id, ttl_ns if ttl_ns > least_ttl_ns else least_ttl_ns, now_ns)
        owned = self._of_owner.get(owner)
        if owned is None:
            self._of_owner[owner] = {lease_id}
        else:
            owned.add(lease_id)
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
        self._order.use(lease_id, max(self._ttl_ns, lease.least_ttl_ns), now_ns)
        return True

    def release(self, lease_id: LeaseId, owner: ConnectionId) -> list[HoldId]:
        """End a lease; the holds to release. Empty if it had ended before or is another's."""
        lease = self._by_id.get(lease_id)
        return self._end(lease) if lease is not None and lease.owner == owner else []

    def drop_owner(self, owner: ConnectionId) -> list[HoldId]:
        """End every lease of a connection; the first holds to release, `expire` has the others."""
        if owner not in self._of_owner:
            return []
        self._leaving.append(owner)
        return self.expire(0) if len(self._leaving) == 1 else []

    def expire(self, now_ns: int) -> list[HoldId]:
        """End leases and tickets that have expired or lost their owner, a bounded number. Returns the holds to release."""
        holds: list[HoldId] = []
        left = ENDED_AT_ONCE
        while left > 0 and (over := self._end_next(now_ns)) is not None:
            held, ended = over
            holds.extend(ended)
            left -= ENDED_COST + held
        self.has_backlog = left <= 0
        return holds

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Leases of each connection."""
        return {owner: {"leases": len(leases)} for owner, leases in self._of_owner.items()}

    def is_full(self, owner: ConnectionId, leases_max: int) -> bool:
        """Whether a connection has so many leases, or holds as many chunks as it may."""
        has_all = len(self._of_owner.get(owner, ())) >= leases_max
        return has_all or self._held_chunks.get(owner, 0) >= HELD_CHUNKS_MAX

    def has_room_for(self, owner: ConnectionId, chunks: int = 0) -> bool:
        """Whether the holds of a connection, with its unclaimed tickets and of so many chunks more, are within its bound."""
        return self._held_chunks.get(owner, 0) + chunks < HELD_CHUNKS_MAX

    def has_room_for_tickets(self, issuer: ConnectionId, chunks: int, tickets: int = 1) -> bool:
        """Whether so many tickets may be issued, the holds of each of `chunks` chunks together.

        Half of the tickets that the others leave are an issuer's own.
        """
        own = self._issued[issuer]
        left = TICKETS_MAX - (len(self._tickets) - own)
        has_room = own + tickets <= left // 2 and self._ticket_chunks + tickets * chunks <= TICKET_CHUNKS_MAX
        return has_room and self.has_room_for(issuer, (tickets - 1) * chunks)

    def issue_ticket(
        self,
        identity: tuple[str, bytes],
        issuer: ConnectionId,
        chunks: int,
        holds: HoldsByRank,
        *,
        now_ns: int,
        rows: int | None = None,
        claims: int = 0,
    ) -> bytes:
        """A new ticket over holds of its own. `identity`: what a claimer must have in common: model and layout but for the
        rank. `rows`: as in `grant`; `claims`: see `TicketHold`."""
        entry = TicketHold(identity, issuer, chunks, dict(holds), chunks if rows is None else rows, claims)
        assert self.has_room_for_tickets(issuer, entry.held)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = entry
        self._ticket_order.use(ticket, self._ttl_ns, now_ns)
        self._issued[issuer] += 1
        self._count_ticket(entry, entry.held)
        return ticket

    def find_ticket(self, ticket: bytes) -> TicketHold | None:
        """The holds of a ticket; None for a used, expired or forged one."""
        return self._tickets.get(ticket)

    def take_from_ticket(self, ticket: bytes, rank: int) -> Sequence[HoldId]:
        """The holds of one rank, which leave the ticket. The ticket ends with its last ones."""
        entry = self._tickets[ticket]
        holds = entry.holds.pop(rank)
        self._count_ticket(entry, -entry.rows)
        if not entry.holds:
            del self._tickets[ticket]
            self._ticket_order.remove(ticket)
            self._end_issued(entry.issuer)
        return holds

    def end_ticket(self, ticket: bytes) -> list[HoldId]:
        """End a ticket that will not be claimed. Returns the holds to release."""
        return [hold for rank in list(self._tickets[ticket].holds) for hold in self.take_from_ticket(ticket, rank)]

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = self._order.verify() + self._ticket_order.verify()
        owned = {lease_id for lease_ids in self._of_owner.values() for lease_id in lease_ids}
        if len(self._order) != len(self._by_id) or len(self._ticket_order) != len(self._tickets):
            problems.append("leases: there are more or fewer deadlines than leases and tickets")
        if owned != set(self._by_id):
            problems.append(f"leases: owners name {len(owned)} leases, {len(self._by_id)} exist")
        holds = self.holds() + [hold for entry in self._tickets.values() for hold in _all_of(entry)]
        if len(holds) != len(set(holds)):
            problems.append("leases: a hold is in two leases or tickets")
        of_tickets = sum(entry.held for entry in self._tickets.values())
        of_leases = sum(lease.held for lease in self._by_id.values())
        if self._issued != Counter(entry.issuer for entry in self._tickets.values()):
            problems.append("leases: the tickets of an issuer are miscounted")
        if self._ticket_chunks != of_tickets or sum(self._held_chunks.values()) != of_tickets + of_leases:
            problems.append("leases: the chunks that leases and tickets hold are miscounted")
        return problems

    def holds(self) -> list[HoldId]:
        """The holds of leases in the directory, the oldest lease first."""
        return [hold for lease in self._by_id.values() for hold in _all_of(lease)]

    def hold_count(self) -> int:
        """Holds that leases and tickets have in the directory."""
        entries: list[Lease | TicketHold] = [*self._by_id.values(), *self._tickets.values()]
        return sum(len(of_rank) for entry in entries for of_rank in entry.holds.values())

    def _end_next(self, now_ns: int) -> tuple[int, list[HoldId]] | None:
        """End one expired or ownerless lease or ticket. Returns how many chunks it held, and its holds; None: there is none."""
        while self._leaving:
            owned = self._of_owner.get(self._leaving[0])
            if owned:
                lease = self._by_id[owned.pop()]
                return lease.held, self._end(lease)
            self._leaving.popleft()
        if (lease_id := self._order.next_over(now_ns)) is not None:
            self.expired_leases += 1
            oldest = self._by_id[lease_id]
            return oldest.held, self._end(oldest)
        if (ticket := self._ticket_order.next_over(now_ns)) is not None:
            entry = self._tickets.pop(ticket)
            self._ticket_order.remove(ticket)
            self._end_issued(entry.issuer)
            self._count_ticket(entry, -entry.held)
            return entry.held, _all_of(entry)
        return None

    def _end(self, lease: Lease) -> list[HoldId]:
        lease_id, owner = lease.id, lease.owner
        del self._by_id[lease_id]
        self._order.remove(lease_id)
        self._count_chunks(owner, -lease.held)
        owned = self._of_owner[owner]
        owned.discard(lease_id)
        if not owned:
            del self._of_owner[owner]
        if len(lease.holds) == 1:
            (holds,) = lease.holds.values()
            return list(holds)
        return _all_of(lease)

    def _end_issued(self, issuer: ConnectionId) -> None:
        self._issued[issuer] -= 1
        if not self._issued[issuer]:
            del self._issued[issuer]

    def _count_ticket(self, entry: TicketHold, chunks: int) -> None:
        self._ticket_chunks += chunks
        self._count_chunks(entry.issuer, chunks)

    def _count_chunks(self, owner: ConnectionId, chunks: int) -> None:
        count = self._held_chunks.get(owner, 0) + chunks
        assert count >= 0
        if count:
            self._held_chunks[owner] = count
        else:
            self._held_chunks.pop(owner, None)


def _all_of(entry: Lease | TicketHold) -> list[HoldId]:
    """The holds of all its ranks."""
    return list(chain.from_iterable(entry.holds.values()))
