"""Leases and tickets: time-limited protection of chunks, by deadline.

A chunk with a live lease is never evicted or overwritten. A lease belongs to a connection and ends with it, when it
is released, or when it was not used for its time to live. A ticket is a hold of its own: it belongs to no connection and lasts
until every rank has claimed it, or as many claims as it was issued for have come, or it expires, even if its issuer ends.

Control thread only. `now_ns` is an argument everywhere: no clock is read here. The chunks themselves are protected by
holds in the native directory; this module records which holds exist for whom and returns those to release: a bounded number at
a time, because ending all holds of one connection may take a tenth of a second. Leases are in the native table, where requests
find them; tickets are here.

Invariant: each hold id is in exactly one lease or ticket; `_ticket_order` names the tickets; the table counts the chunks of
every hold by the connection that asked for it, `_ticket_chunks` those of tickets; `_issued` has each ticket once.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import kvpool_native
from kvpool.ids import NUMBER_MAX, TICKET_BYTES, ConnectionId, HoldId
from kvpool.index.deadline_order import DeadlineOrder

TICKETS_MAX = 65536
# A hold costs 4 bytes for each chunk: 16 MiB for a connection, 64 MiB for tickets, which outlive theirs. It costs some 220 for
# itself, and a lease as much again: those of a connection are bounded by their number.
HELD_CHUNKS_MAX = 4 << 20
TICKET_CHUNKS_MAX = 16 << 20
# Chunks released in one call: about a quarter of a millisecond. A lease or ticket itself costs as much as some chunks.
ENDED_AT_ONCE = 4096
ENDED_COST = 64


# The holds of each rank, in the order of a lease's rows.
HoldsByRank = Mapping[int, Sequence[HoldId]]


Lease = kvpool_native.Lease


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
        self.table = kvpool_native.LeaseTable(ttl_ns)
        self._tickets: dict[bytes, TicketHold] = {}
        self._ticket_order: DeadlineOrder[bytes] = DeadlineOrder()
        self._issued: Counter[ConnectionId] = Counter()  # tickets of each issuer
        self._ticket_chunks = 0
        self.has_backlog = False  # there is more to end: call `expire` again soon

    def __len__(self) -> int:
        return len(self.table)

    @property
    def tickets(self) -> int:
        """Tickets that may still be claimed."""
        return len(self._tickets)

    def count_of(self, owner: ConnectionId) -> int:
        """Leases of one connection."""
        return self.table.count_of(owner)

    @property
    def expired_leases(self) -> int:
        """Leases that ended at their deadlines."""
        return self.table.expired

    def change_ttl(self, ttl_ns: int) -> None:
        """Change the time to live of leases from their next use on, and of tickets that are issued from now on."""
        assert ttl_ns > 0
        self._ttl_ns = ttl_ns
        self.table.change_ttl(ttl_ns)

    def grant(
        self,
        owner: ConnectionId,
        chunks: int,
        holds: HoldsByRank,
        now_ns: int,
        *,
        least_ttl_ns: int = 0,
        rows: int | None = None,
        set_group: int | None = None,
    ) -> Lease:
        """A new lease over `holds`, as many on each rank. `rows`: of each rank; None: `chunks`. `set_group`: whose chunks they
        are, where they are a set of that group's alone."""
        assert chunks > 0
        assert holds
        flat = list(chain.from_iterable(holds.values()))
        rows = chunks if rows is None else rows
        lease_id = self.table.grant(owner, chunks, rows, list(holds), flat, least_ttl_ns, now_ns, set_group)
        lease = self.table.find(lease_id, owner)
        assert lease is not None
        return lease

    def find(self, lease_id: int, owner: ConnectionId) -> Lease | None:
        """The lease, if it lives and belongs to `owner`. Any number may be asked for."""
        return self.table.find(lease_id, owner) if 0 < lease_id <= NUMBER_MAX else None

    def renew(self, lease_id: int, owner: ConnectionId, now_ns: int) -> bool:
        """Count the lease as used now. False if it has ended or is another's."""
        return self.table.renew(lease_id, owner, now_ns)

    def drop_owner(self, owner: ConnectionId) -> list[HoldId]:
        """End every lease of a connection; the first holds to release, `expire` has the others."""
        if not self.table.count_of(owner):
            return []
        self.table.end_owner(owner)
        return [] if self.has_backlog else self.expire(0)

    def expire(self, now_ns: int) -> list[HoldId]:
        """End leases and tickets that have expired or lost their owner, a bounded number. Returns the holds to release."""
        ended, left = self.table.expire(now_ns, ENDED_AT_ONCE, ENDED_COST)
        holds = cast("list[HoldId]", ended)
        while left > 0 and (ticket := self._ticket_order.next_over(now_ns)) is not None:
            entry = self._tickets.pop(ticket)
            self._ticket_order.remove(ticket)
            self._end_issued(entry.issuer)
            left -= ENDED_COST + entry.held
            self._count_ticket(entry, -entry.held)
            holds.extend(_all_of(entry))
        self.has_backlog = left <= 0
        return holds

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Leases of each connection."""
        return {ConnectionId(owner): {"leases": leases} for owner, leases in self.table.owners()}

    def has_room_for(self, owner: ConnectionId, chunks: int = 0) -> bool:
        """Whether the holds of a connection, with its unclaimed tickets and of so many chunks more, are within its bound."""
        return self.table.chunks_of(owner) + chunks < HELD_CHUNKS_MAX

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
        problems = self.table.verify() + self._ticket_order.verify()
        if len(self._ticket_order) != len(self._tickets):
            problems.append("leases: there are more or fewer deadlines than tickets")
        leases = self.table.all()
        entries: list[Lease | TicketHold] = [*leases, *self._tickets.values()]
        holds = [hold for entry in entries for hold in _all_of(entry)]
        if len(holds) != len(set(holds)):
            problems.append("leases: a hold is in two leases or tickets")
        of_tickets = sum(entry.held for entry in self._tickets.values())
        of_leases = sum(lease.held for lease in leases)
        if self._issued != Counter(entry.issuer for entry in self._tickets.values()):
            problems.append("leases: the tickets of an issuer are miscounted")
        if self._ticket_chunks != of_tickets or self.table.all_chunks != of_tickets + of_leases:
            problems.append("leases: the chunks that leases and tickets hold are miscounted")
        return problems

    def holds(self) -> list[HoldId]:
        """The holds of leases in the directory, the oldest lease first."""
        return [hold for lease in self.table.all() for hold in _all_of(lease)]

    def hold_count(self) -> int:
        """Holds that leases and tickets have in the directory."""
        of_tickets = sum(len(of_rank) for entry in self._tickets.values() for of_rank in entry.holds.values())
        return len(self.holds()) + of_tickets

    def _end_issued(self, issuer: ConnectionId) -> None:
        self._issued[issuer] -= 1
        if not self._issued[issuer]:
            del self._issued[issuer]

    def _count_ticket(self, entry: TicketHold, chunks: int) -> None:
        self._ticket_chunks += chunks
        self.table.count_chunks(entry.issuer, chunks)


def _all_of(entry: Lease | TicketHold) -> list[HoldId]:
    """The holds of all its ranks."""
    return cast("list[HoldId]", list(chain.from_iterable(entry.holds.values())))
