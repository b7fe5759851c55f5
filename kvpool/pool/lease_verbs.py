"""Lease verbs: release, renewal, tickets, and reports that a leased chunk is bad.

`chains` grants leases. Control thread only.
"""

from kvpool.checks.dram_check import DramCheck
from kvpool.clock import Clock
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
        for lease in columns.unpack_leases(request.leases):
            self._readers.release(session, lease, self._clock.now_ns())
        return m.Done()

    @verb(m.Renew, roles=ENGINE)
    def renew(self, session: EngineSession, request: m.Renew) -> m.Done:
        """Count leases as used now."""
        self._readers.renew(session, columns.unpack_leases(request.leases), self._clock.now_ns())
        return m.Done()

    @verb(m.IssueTicket, roles=ENGINE)
    def issue_ticket(self, session: EngineSession, request: m.IssueTicket) -> m.Ticket:
        """A ticket on a lease: a hold of its own for each rank."""
        ticket = self._readers.issue_ticket(session, request.lease, self._clock.now_ns())
        self._expiry.schedule()
        return m.Ticket(ticket)

    @verb(m.Claim, roles=ENGINE)
    def claim(self, session: EngineSession, request: m.Claim) -> m.Leased:
        """A lease from a ticket, for the session's rank, once."""
        return self._chains.lease(session, self._readers.claim(session, request.ticket, self._clock.now_ns()))

    @verb(m.ReportCorrupt, roles=ENGINE)
    async def check_reported(self, session: EngineSession, request: m.ReportCorrupt) -> m.Done:
        """Recompute the checksums of a leased chunk that a client found bad; drop it if it is."""
        lease = self._readers.find(session, request.lease)
        rank = session.layout.rank
        if lease is not None and rank is not None and 0 <= request.chunk < lease.chunks:
            layout, hold = session.own.layout, lease.holds[rank]
            await self._dram_check.check_reported(
                hold, request.chunk, chunk_bytes=layout.chunk_bytes, layers=layout.layers
            )
        return m.Done()
