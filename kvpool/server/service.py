"""Requests of a connection: each request's record and the pool's verb that answers it.

The handlers hold no state of their own. Most answer at once; what may be about a long chain is served in parts, where it may
also wait for memory, and checks of bytes run on the transfer threads. Control thread only.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.pool.pool import Pool
from kvpool.protocol import hit_curve
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import staging as sm
from kvpool.server.connections.audit import audited
from kvpool.server.connections.batches import serve_batch
from kvpool.server.connections.connection import Answer, AnswerWithDescriptor, Handler, Handlers
from kvpool.server.connections.local_socket import Peer
from kvpool.server.events.requests import admin_event_handlers, engine_event_handlers
from kvpool.server.health.forked_check import check_in_child
from kvpool.server.reload import Reload
from kvpool.server.steering import steering_handlers

DEMOTE_ALL_S_MAX = 3600.0
PROBLEMS_MAX = 500


def engine_handlers(pool: Pool, session: EngineSession) -> Handlers:
    """The requests of an engine; the operator's are not among them."""
    handlers = _by_kind(
        {
            m.Acquire: lambda request: pool.chains.acquire(session, request),
            m.AcquireLeaves: lambda request: pool.chains.acquire_leaves(session, request),
            m.Release: lambda request: pool.leases.release(session, request.lease),
            one_way.DropLease: lambda request: pool.leases.release(session, request.lease),
            one_way.DropLeases: lambda request: pool.leases.release_each(session, request.leases),
            m.Renew: lambda request: pool.leases.renew(session, request.leases),
            m.IssueTicket: lambda request: pool.leases.issue_ticket(session, request.lease),
            m.Claim: lambda request: pool.leases.claim(session, request.ticket),
            m.Reserve: lambda request: pool.chains.reserve(session, request),
            m.Commit: lambda request: pool.chains.commit(session, request),
            sm.OpenStaging: lambda _: AnswerWithDescriptor(*pool.staged.open(session)),
            sm.CopyStaged: lambda request: pool.staged.copy(session, request),
            m.End: lambda request: pool.chains.end_reservation(session, request),
            one_way.DropReservation: lambda request: pool.chains.end_reservation(session, request),
            m.Usage: lambda request: pool.count_usage(session, request.counts),
            m.Retain: lambda request: pool.hints.retain(session, request),
            m.Announce: lambda request: pool.hints.announce(session, request),
            m.Demote: lambda request: pool.hints.demote(session, request),
            m.ReportCorrupt: lambda request: _report_corrupt(pool, session, request),
            **engine_event_handlers(pool, session),
        }
    )
    handlers[bm.Batch.KIND] = (bm.Batch, lambda request: serve_batch(handlers, request))
    return handlers


def admin_handlers(
    pool: Pool, info: Callable[[], dict[str, Any]], connections: "ConnectionCounts", peer: Peer, reload: Reload
) -> Handlers:
    """The requests of an operator, who is `peer`. `info` is what the process knows of itself, now."""
    return _by_kind(
        {
            m.AskInfo: lambda _: m.Report({**info(), **pool.info()}),
            m.AskStats: lambda _: m.Report(pool.stats(connections.stats())),
            m.Flush: audited(peer, "flush", partial(_flush, pool), "model", "older_than_s", "tier"),
            m.DemoteAll: audited(peer, "demote", partial(_demote_all, pool), "timeout_s", "is_forced"),
            m.Check: lambda _: _check(pool),
            m.AskLayouts: lambda request: pool.hints.layouts(request),
            m.RetainKeys: audited(peer, "retain", partial(_retain_keys, pool), "priority", "duration_s"),
            m.VerifyBytes: lambda request: _verify_bytes(pool, request),
            m.AskHitCurve: lambda request: m.Report(pool.hit_curve.report(hit_curve.unpack(request.capacities))),
            **admin_event_handlers(pool),
            **steering_handlers(reload, peer),
        }
    )


class ConnectionCounts:
    """Connections by state, for the statistics.

    Invariant: every number is a count since the daemon's start but `open`, which is now.
    """

    def __init__(self) -> None:
        self.open = 0
        self.accepted = 0
        self.protocol_errors = 0
        self.refused = 0

    def stats(self) -> dict[str, int]:
        """By name."""
        return {
            "connections": self.open,
            "connections_accepted": self.accepted,
            "connections_refused": self.refused,
            "protocol_errors": self.protocol_errors,
        }


def _by_kind(handlers: dict[type[Any], Handler]) -> Handlers:
    return {record.KIND: (record, handler) for record, handler in handlers.items()}


def _flush(pool: Pool, request: m.Flush) -> Parts[Answer]:
    if math.isnan(request.older_than_s):
        return m.Failure("argument", "older_than_s is not a number, expected seconds")
    older_than_s = None if request.older_than_s < 0 else request.older_than_s
    return m.Report((yield from pool.flush(request.model or None, older_than_s, request.tier)))


async def _demote_all(pool: Pool, request: m.DemoteAll) -> Answer:
    if not 0.0 <= request.timeout_s <= DEMOTE_ALL_S_MAX:
        return m.Failure("argument", f"timeout_s is {request.timeout_s}, expected 0 to {DEMOTE_ALL_S_MAX:g}")
    return m.Report(await pool.demote_all(request.timeout_s, is_forced=request.is_forced))


def _retain_keys(pool: Pool, request: m.RetainKeys) -> Answer:
    return pool.hints.retain_keys(request)


async def _report_corrupt(pool: Pool, session: EngineSession, report: m.ReportCorrupt) -> Answer:
    await pool.leases.check_reported(session, report.lease, report.chunk)
    return m.Done()


def _check(pool: Pool) -> Parts[Answer]:
    counting = asyncio.ensure_future(check_in_child(partial(pool.verify, with_shared=False)))
    problems = yield from pool.verify_shared()
    yield counting
    report = counting.result()
    report["problems"] += problems + pool.problems() + pool.shortcomings()
    if len(report["problems"]) > PROBLEMS_MAX:
        more = len(report["problems"]) - PROBLEMS_MAX
        report["problems"] = [*report["problems"][:PROBLEMS_MAX], f"and {more} more"]
    return m.Report(report)


async def _verify_bytes(pool: Pool, request: m.VerifyBytes) -> Answer:
    if not 0 < request.chunks <= m.RECORDS_MAX:
        return m.Failure("argument", f"chunks is {request.chunks}, expected 1..{m.RECORDS_MAX}")
    return m.Report(await pool.verify_bytes(request.places, request.chunks))
