"""Lease verbs: release, renewal, tickets, promises, and reports that a leased chunk is bad.

`chains` grants leases. Control thread only.
"""

from functools import partial

from kvpool import failpoint
from kvpool.checks.dram_check import DramCheck
from kvpool.clock import Clock
from kvpool.errors import InvalidArgument
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.pool.chains import Chains
from kvpool.pool.deadlines import HoldExpiry
from kvpool.pool.readers.readers import TICKETS, Readers, Taken
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import promises as pr
from kvpool.protocol.verbs import ENGINE, verb

NOTHING_PROMISED = pr.Promised(0, b"", b"")


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

    @verb(one_way.DropLeases, roles=ENGINE)
    def drop_leases(self, session: EngineSession, request: one_way.DropLeases) -> None:
        """End the leases of a column."""
        self._readers.release_each(session, columns.unpack_numbers(request.leases, "leases"), self._clock.now_ns())

    def release(self, session: EngineSession, lease: int) -> None:
        """End a lease; nothing where it had ended before."""
        self._readers.release(session, lease, self._clock.now_ns())

    @verb(m.Renew, roles=ENGINE)
    def renew(self, session: EngineSession, request: m.Renew) -> m.Done:
        """Count leases as used now."""
        self._readers.renew(session, columns.unpack_numbers(request.leases, "leases"), self._clock.now_ns())
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
        """Tickets on what is there of these chunks: for engines whose scheduler decides and whose workers load.

        Waits as `Chains.acquire` does. Nothing where there is no room for all of the tickets.
        """
        _check_claims(request.claims)
        if not 0 < request.tickets <= m.CLAIMS_MAX:
            raise InvalidArgument(f"tickets is {request.tickets}, expected 1..{m.CLAIMS_MAX}")
        failpoint.reach("daemon.ticket.before_issue", failpoint.refused)
        promised = yield from self._chains.hold(session, request, TICKETS, give=partial(self._promise, request))
        if not promised.chunks:
            return promised
        tickets = yield from self._issue_all(session, promised.tickets, request.tickets)
        return pr.Promised(promised.chunks, promised.tiers, tickets) if tickets else NOTHING_PROMISED

    def _promise(self, request: pr.Promise, session: EngineSession, taken: Taken) -> pr.Promised:
        """The first ticket on what was taken, where there is room for all."""
        now_ns, tickets, claims = self._clock.now_ns(), request.tickets, request.claims
        ticket, levels = self._readers.promise(session, taken, now_ns, tickets=tickets, claims=claims)
        if not ticket:
            return NOTHING_PROMISED
        self._chains.note_use(session, taken)
        return pr.Promised(taken.chunks, levels, ticket)

    def _issue_all(self, session: EngineSession, first: bytes, count: int) -> Parts[bytes]:
        """So many tickets on the chunks of the first one, with it, one after the other; none where not all have room."""
        made, tickets = [first], b""
        try:
            failpoint.reach("daemon.acquire.after_grant", failpoint.refused)
            while len(made) < count:
                yield None
                ticket = self._readers.issue_another(session, first, self._clock.now_ns())
                if not ticket:
                    return b""
                made.append(ticket)
            tickets = b"".join(made)
            return tickets
        finally:
            if not tickets:
                self._readers.end_tickets(made, self._clock.now_ns())

    @verb(m.Claim, roles=ENGINE)
    def claim(self, session: EngineSession, request: m.Claim) -> m.Leased:
        """A lease from a ticket, for the session's rank."""
        return self._chains.note_leased(session, self._readers.claim(session, request.ticket, self._clock.now_ns()))

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
