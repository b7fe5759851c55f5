"""Verbs on leases that are there: release, renewal, tickets, and reports that a leased chunk is bad.

What takes leases is `chains`. Control thread only.
"""

from kvpool.checks.dram_check import DramCheck
from kvpool.clock import Clock
from kvpool.index.sessions import EngineSession
from kvpool.pool.chains import Chains
from kvpool.pool.deadlines import HoldExpiry
from kvpool.pool.readers.readers import Readers
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m


class LeaseVerbs:
    """See the module."""

    def __init__(
        self, readers: Readers, chains: Chains, expiry: HoldExpiry, dram_check: DramCheck, clock: Clock
    ) -> None:
        self._readers = readers
        self._chains = chains
        self._expiry = expiry
        self._dram_check = dram_check
        self._clock = clock

    def release(self, session: EngineSession, lease: int) -> m.Done:
        """End a lease."""
        self._readers.release(session, lease, self._clock.now_ns())
        return m.Done()

    def release_each(self, session: EngineSession, leases: bytes) -> m.Done:
        """End the leases of a column."""
        for lease in columns.unpack_leases(leases):
            self._readers.release(session, lease, self._clock.now_ns())
        return m.Done()

    def renew(self, session: EngineSession, leases: bytes) -> m.Done:
        """Count leases as used now."""
        self._readers.renew(session, columns.unpack_leases(leases), self._clock.now_ns())
        return m.Done()

    def issue_ticket(self, session: EngineSession, lease: int) -> m.Ticket:
        """A ticket on a lease: a hold of its own for each rank."""
        ticket = self._readers.issue_ticket(session, lease, self._clock.now_ns())
        self._expiry.schedule()
        return m.Ticket(ticket)

    def claim(self, session: EngineSession, ticket: bytes) -> m.Leased:
        """A lease from a ticket, for the session's rank, once."""
        return self._chains.lease(session, self._readers.claim(session, ticket, self._clock.now_ns()))

    async def check_reported(self, session: EngineSession, lease_id: int, chunk: int) -> None:
        """Recompute the checksums of a leased chunk that a client found bad; drop it if it is."""
        lease = self._readers.find(session, lease_id)
        rank = session.layout.rank
        if lease is None or rank is None or not 0 <= chunk < lease.chunks:
            return
        layout = session.own.layout
        await self._dram_check.check_reported(lease.holds[rank], chunk, layout.chunk_bytes, layout.layers)
