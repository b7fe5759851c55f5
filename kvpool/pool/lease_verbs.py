"""Lease verbs: release, renewal, tickets, and reports that a leased chunk is bad.

`chains` grants leases. Control thread only.
"""

from kvpool.checks.dram_check import DramCheck
from kvpool.clock import Clock
from kvpool.errors import InvalidArgument
from kvpool.index.sessions import EngineSession
from kvpool.pool.chains import Chains
from kvpool.pool.deadlines import HoldExpiry
from kvpool.pool.readers.readers import Readers
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
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
        if not 0 <= request.claims <= m.CLAIMS_MAX:
            raise InvalidArgument(f"claims is {request.claims}, expected 0..{m.CLAIMS_MAX}")
        ticket = self._readers.issue_ticket(session, request.lease, self._clock.now_ns(), claims=request.claims)
        self._expiry.schedule()
        return m.Ticket(ticket)

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
