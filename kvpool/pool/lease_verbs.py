"""Lease verbs: release, renewal, tickets, promises, and reports that a leased chunk is bad.

`chains` grants leases. Control thread only.
"""

from kvpool.checks.dram_check import DramCheck
from kvpool.clock import Clock
from kvpool.errors import InvalidArgument, ProtocolError
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.key_column import packed_bytes
from kvpool.pool.chains import Chains
from kvpool.pool.deadlines import HoldExpiry
from kvpool.pool.readers.readers import Readers
from kvpool.protocol import columns
from kvpool.protocol.records import groups as gm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import peers as pm
from kvpool.protocol.records import promises as pr
from kvpool.protocol.verbs import ENGINE, verb


class LeaseVerbs:
    """See the module."""

    def __init__(
        self, readers: Readers, chains: Chains, expiry: HoldExpiry, *, dram_check: DramCheck, clock: Clock
    ) -> None:
        self._readers = readers
        self._chains = chains
        self._expiry = expiry
        self._dram_check = dram_check
        self._clock = clock

    @verb(m.Release, one_way.DropLease, roles=ENGINE)
    def release(self, session: EngineSession, request: m.Release | one_way.DropLease) -> m.Done:
        """End a lease."""
        self._readers.release(session, request.lease, self._clock.now_ns())
        return m.Done()

    @verb(one_way.DropLeases, roles=ENGINE)
    def release_each(self, session: EngineSession, request: one_way.DropLeases) -> m.Done:
        """End the leases of a column."""
        self._readers.release_each(session, columns.unpack_leases(request.leases), self._clock.now_ns())
        return m.Done()

    @verb(m.Renew, roles=ENGINE)
    def renew(self, session: EngineSession, request: m.Renew) -> m.Done:
        """Count leases as used now."""
        self._readers.renew(session, columns.unpack_leases(request.leases), self._clock.now_ns())
        return m.Done()

    @verb(m.IssueTicket, roles=ENGINE)
    def issue_ticket(self, session: EngineSession, request: m.IssueTicket) -> m.Ticket:
        """A ticket on a lease: a hold of its own for each rank."""
        _check_claims(request.claims)
        ticket = self._readers.issue_ticket(session, request.lease, self._clock.now_ns(), claims=request.claims)
        self._expiry.schedule()
        return m.Ticket(ticket)

    @verb(pr.Promise, roles=ENGINE)
    def promise(self, session: EngineSession, request: pr.Promise) -> Parts[pr.Promised]:
        """A lease that ends at once, and tickets on it: for engines whose scheduler decides and whose workers load.

        Waits as `Chains.acquire` does. Nothing where there is no room for all of the tickets.
        """
        _check_claims(request.claims)
        if not 0 < request.tickets <= m.CLAIMS_MAX:
            raise InvalidArgument(f"tickets is {request.tickets}, expected 1..{m.CLAIMS_MAX}")
        leased = yield from self._acquire(session, request)
        if not leased.lease:
            return pr.Promised(0, b"", b"")
        tickets = yield from self._exchange_lease(session, leased.lease, request)
        self._expiry.schedule()
        return pr.Promised(leased.chunks, leased.tiers, tickets) if tickets else pr.Promised(0, b"", b"")

    def _exchange_lease(self, session: EngineSession, lease: int, request: pr.Promise) -> Parts[bytes]:
        """End a lease. Returns the tickets that take its place, one after the other; none where not all have room."""
        made: list[bytes] = []
        try:
            if not self._readers.has_room_for_tickets(session, lease, request.tickets):
                return b""
            while ticket := self._readers.issue_ticket(session, lease, self._clock.now_ns(), claims=request.claims):
                made.append(ticket)
                if len(made) == request.tickets:
                    return b"".join(made)
                yield None
            return b""
        finally:
            now_ns = self._clock.now_ns()
            self._readers.release(session, lease, now_ns)
            if len(made) < request.tickets:
                self._readers.end_tickets(made, now_ns)

    def _acquire(self, session: EngineSession, request: pr.Promise) -> Parts[m.Leased]:
        """The lease of a promise. Raises ProtocolError, Refused."""
        if session.groups:
            return (yield from self._chains.acquire_groups(session, gm.AcquireGroups(request.keys, request.chunks)))
        ranks = len(session.namespaces)
        if len(request.keys) == packed_bytes(request.chunks * ranks):
            return (yield from self._chains.acquire_from(session, pm.AcquireFrom(request.keys, request.owner)))
        if request.owner:
            raise ProtocolError(f"keys column has {len(request.keys)} bytes for {request.chunks} chunks of an owner")
        return self._chains.acquire_leaves(session, m.AcquireLeaves(request.keys, request.chunks))

    @verb(m.Claim, roles=ENGINE)
    def claim(self, session: EngineSession, request: m.Claim) -> m.Leased:
        """A lease from a ticket, for the session's rank."""
        return self._chains.lease(session, self._readers.claim(session, request.ticket, self._clock.now_ns()))

    @verb(m.ReportCorrupt, roles=ENGINE)
    async def check_reported(self, session: EngineSession, request: m.ReportCorrupt) -> m.Done:
        """Recompute the checksums of a leased chunk that a client found bad; drop it if it is."""
        lease = self._readers.find(session, request.lease)
        row = self._readers.find_row(session, lease, request.chunk) if lease is not None else None
        if row is not None:
            hold, chunk, layout = row
            await self._dram_check.check_reported(hold, chunk, layout)
        return m.Done()


def _check_claims(claims: int) -> None:
    """Raises InvalidArgument."""
    if not 0 <= claims <= m.CLAIMS_MAX:
        raise InvalidArgument(f"claims is {claims}, expected 0..{m.CLAIMS_MAX}")
