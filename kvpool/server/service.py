"""Verbs of a connection: what answers an engine, and what an operator.

Each verb is declared at its method (`protocol/verbs.py`); here are those that the pool's own classes do not answer, and the
list of all classes. Most answer at once; requests about long chains are served in parts, and may wait for memory; checks of
bytes run on the transfer threads. Control thread only.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvpool.clock import Clock
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.key_column import SHOWN_DIGITS, KeyColumn
from kvpool.pool.chains import Chains
from kvpool.pool.device_copies import DeviceCopies
from kvpool.pool.hint_handlers import HintHandlers
from kvpool.pool.lease_verbs import LeaseVerbs
from kvpool.pool.pool import Pool
from kvpool.pool.sharing.seeking import Seeking
from kvpool.pool.writers.staged_saves import StagedSaves
from kvpool.protocol import hit_curve
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import operator as om
from kvpool.protocol.verbs import ENGINE, OPERATOR, handlers_of, verb, verbs_of
from kvpool.server.connections.audit import audit, audited
from kvpool.server.connections.batches import serve_batch
from kvpool.server.connections.connection import Answer, AnswerWithDescriptor, Handlers
from kvpool.server.connections.local_socket import Peer
from kvpool.server.connections.requests import ConnectionVerbs
from kvpool.server.events.engine_reports import EngineReportVerbs
from kvpool.server.events.requests import EventVerbs
from kvpool.server.health.forked_check import check_in_child
from kvpool.server.peers.peer_list import PeerVerbs
from kvpool.server.steering import SteeringVerbs
from kvpool.states import RetainState

DEMOTE_ALL_S_MAX = 3600.0
PROBLEMS_MAX = 500


class EngineVerbs:
    """The requests of an engine that are not about chains, leases or hints. `handlers`: what a Batch may carry."""

    def __init__(self, pool: Pool, session: EngineSession, handlers: Handlers) -> None:
        self._pool = pool
        self._session = session
        self._handlers = handlers

    @verb(bm.Batch, roles=ENGINE)
    def batch(self, request: bm.Batch) -> Parts[bm.Batched]:
        """Requests that came together."""
        return serve_batch(self._handlers, self._session.layout, request)

    @verb(mm.OpenMemory, roles=ENGINE)
    def open_memory(self, request: mm.OpenMemory) -> AnswerWithDescriptor:
        """The memory of the tier of copies, for an engine on its device, or the connection's staging memory."""
        if request.uuid:
            return AnswerWithDescriptor(*self._pool.device_copies.open(self._session, request.uuid))
        return AnswerWithDescriptor(*self._pool.staged.open(self._session))

    @verb(m.Usage, roles=ENGINE)
    def usage(self, request: m.Usage) -> None:
        """Count what the client says it did."""
        self._pool.count_usage(self._session, request.counts)


class OperatorVerbs:
    """The requests of the operator `peer` about the pool. `info` returns the process's fields of the info report."""

    def __init__(
        self, pool: Pool, info: Callable[[], dict[str, Any]], connections: "ConnectionCounts", peer: Peer
    ) -> None:
        self._pool = pool
        self._info = info
        self._connections = connections
        self.peer = peer

    @verb(m.AskInfo, roles=OPERATOR)
    def info(self, _request: m.AskInfo) -> m.Report:
        """The daemon's identity and resources."""
        return m.Report({**self._info(), **self._pool.info()})

    @verb(m.AskStats, roles=OPERATOR)
    def stats(self, _request: m.AskStats) -> m.Report:
        """Counters by section."""
        return m.Report(self._pool.stats(self._connections.stats()))

    @verb(om.AskModels, roles=OPERATOR)
    def models(self, _request: om.AskModels) -> Parts[m.Report]:
        """What is stored of each model."""
        return m.Report((yield from self._pool.models()))

    @verb(m.Flush, roles=OPERATOR)
    @audited("flush", "model", "older_than_s", "tier")
    def flush(self, request: m.Flush) -> Parts[Answer]:
        """Drop chunks that nobody holds."""
        if math.isnan(request.older_than_s):
            return m.Failure("argument", "older_than_s is not a number, expected seconds")
        older_than_s = None if request.older_than_s < 0 else request.older_than_s
        flushed = yield from self._pool.flush(request.model or None, older_than_s, request.tier)
        audit(self.peer, "flush ended", **flushed)
        return m.Report(flushed)

    @verb(m.DemoteAll, roles=OPERATOR)
    @audited("demote", "timeout_s", "is_forced")
    async def demote_all(self, request: m.DemoteAll) -> Answer:
        """Have the SSD tier keep what DRAM alone has."""
        if not 0.0 <= request.timeout_s <= DEMOTE_ALL_S_MAX:
            return m.Failure("argument", f"timeout_s is {request.timeout_s}, expected 0 to {DEMOTE_ALL_S_MAX:g}")
        pool = self._pool
        is_more_coming = (lambda: pool.is_busy) if pool.chains.is_drained else None
        demoted = await pool.demote_all(request.timeout_s, is_more_coming, is_forced=request.is_forced)
        audit(self.peer, "demote ended", **demoted)
        return m.Report(demoted)

    @verb(m.RetainKeys, roles=OPERATOR)
    @audited("retain", "priority", "duration_s")
    def retain_keys(self, request: m.RetainKeys) -> Awaitable[m.Retained]:
        """Keep chunks of whatever namespace with one priority. Raises ProtocolError."""
        return self._audit_retained(request, self._pool.hints.retain_keys(request))

    async def _audit_retained(self, request: m.RetainKeys, retaining: Awaitable[m.Retained]) -> m.Retained:
        retained = await retaining
        counts = {state.name.lower(): retained.states.count(state) for state in RetainState}
        first_key = next(iter(KeyColumn(request.keys)), b"").hex()[:SHOWN_DIGITS]
        audit(self.peer, "retain ended", chunks=len(retained.states), first_key=first_key, **counts)
        return retained

    @verb(m.Check, roles=OPERATOR)
    def check(self, _request: m.Check) -> Parts[m.Report]:
        """Recount every invariant, in a child process but for what clients map."""
        counting = asyncio.ensure_future(self._check_in_child())
        problems = yield from self._pool.verify_shared()
        yield counting
        report = counting.result()
        report["problems"] += problems + self._pool.problems() + self._pool.shortcomings()
        if len(report["problems"]) > PROBLEMS_MAX:
            more = len(report["problems"]) - PROBLEMS_MAX
            report["problems"] = [*report["problems"][:PROBLEMS_MAX], f"and {more} more"]
        return m.Report(report)

    async def _check_in_child(self) -> dict[str, Any]:
        room = await self._pool.make_copy_room()
        verify, copied = partial(self._pool.verify, with_shared=False), partial(self._pool.copied_for_child, room)
        return await check_in_child(verify, copied=copied)

    @verb(m.VerifyBytes, roles=OPERATOR)
    async def verify_bytes(self, request: m.VerifyBytes) -> Answer:
        """Read some chunks and compare them with their checksums."""
        if not 0 < request.chunks <= m.RECORDS_MAX:
            return m.Failure("argument", f"chunks is {request.chunks}, expected 1..{m.RECORDS_MAX}")
        return m.Report(await self._pool.verify_bytes(request.places, request.chunks))

    @verb(m.AskHitCurve, roles=OPERATOR)
    def hit_curve(self, request: m.AskHitCurve) -> m.Report:
        """The hit rates of LRU of some sizes."""
        return m.Report(self._pool.hit_curve.report(hit_curve.unpack(request.capacities)))


class ConnectionCounts:
    """Connections by state, for the statistics.

    Invariant: every number is a count since the daemon's start but `open`, which is now.
    """

    def __init__(self, refused: Callable[[], int]) -> None:
        """`refused`: how many were before their first request."""
        self.open = 0
        self.accepted = 0
        self.protocol_errors = 0
        self._refused = refused

    def stats(self) -> dict[str, int]:
        """By name."""
        return {
            "connections": self.open,
            "accepted_connections": self.accepted,
            "refused_connections": self._refused(),
            "protocol_errors": self.protocol_errors,
        }


# Every class that declares verbs: what a daemon serves.
VERBS = verbs_of(
    *(Chains, LeaseVerbs, HintHandlers, StagedSaves, Seeking, DeviceCopies, EngineVerbs),
    *(OperatorVerbs, EventVerbs, EngineReportVerbs, SteeringVerbs, ConnectionVerbs, PeerVerbs),
)


def engine_handlers(pool: Pool, session: EngineSession, *, user: int | None, clock: Clock) -> Handlers:
    """The handlers of an engine's connection. `user`: whose share counts what it reports, if anybody's."""
    own = (pool.chains, pool.leases, pool.hints, pool.staged, pool.sharing.seeking, pool.device_copies)
    handlers = handlers_of(m.ROLE_ENGINE, own, session)
    reports = EngineReportVerbs(pool, session, user=user, clock=clock)
    return handlers | handlers_of(
        m.ROLE_ENGINE, (EngineVerbs(pool, session, handlers), EventVerbs(pool, session), reports)
    )


def operator_handlers(pool: Pool, *verbs: OperatorVerbs | SteeringVerbs | ConnectionVerbs | PeerVerbs) -> Handlers:
    """The handlers of an operator's connection."""
    return handlers_of(m.ROLE_ADMIN, (EventVerbs(pool, None), *verbs))
