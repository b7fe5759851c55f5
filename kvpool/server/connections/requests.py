"""Handlers of an operator's requests about connections: list them with what each holds, end one.

The handlers hold no state of their own. Control thread only.
"""

import logging
from typing import Any

from kvpool.clock import NS_PER_S, Clock
from kvpool.ids import ConnectionId
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import operator as om
from kvpool.protocol.verbs import OPERATOR, verb
from kvpool.server.connections.audit import audited
from kvpool.server.connections.input_budget import InputBudget
from kvpool.server.connections.local_socket import Peer
from kvpool.server.connections.roster import Member, Roster

log = logging.getLogger(__name__)

# Those that hold the most: so many rows of this size fit the items of a frame (`frames.ITEMS_MAX`).
ROWS_MAX = 180


class ConnectionVerbs:
    """The requests of the operator `peer`."""

    def __init__(self, pool: Pool, roster: Roster, peer: Peer, *, budget: InputBudget, clock: Clock) -> None:
        self._pool = pool
        self._roster = roster
        self._budget = budget
        self._clock = clock
        self.peer = peer

    @verb(om.AskConnections, roles=OPERATOR)
    def list_connections(self, _request: om.AskConnections) -> m.Report:
        """List all connections, and what each holds."""
        held, now_ns = self._pool.held_by_connection(), self._clock.now_ns()
        rows = [_row(member, held, self._budget, now_ns) for member in self._roster]
        rows.sort(key=lambda row: (-row["held_bytes"], row["id"]))
        return m.Report({"connections": rows[:ROWS_MAX], "left_out": max(0, len(rows) - ROWS_MAX)})

    @verb(om.Disconnect, roles=OPERATOR)
    @audited("disconnect", "connection")
    def disconnect(self, request: om.Disconnect) -> m.Report:
        """End a connection, where there is one of that number."""
        member = self._roster.find(ConnectionId(request.connection))
        if member is not None:
            asked = f"an operator asked for it: {self.peer}"
            end_connection(self._pool, member, asked)
        return m.Report({"disconnected": member is not None})


def end_connection(pool: Pool, member: Member, reason: str) -> None:
    """End a connection. Its leases end now; slots that it may still write stay reserved until its peer has closed."""
    if member.connection.state != "open":
        return  # it was ended before, and has not closed yet
    log.warning("connection %d of %s ends: %s", member.connection.id, member.peer, reason)
    pool.end_reading(member.connection.id)
    member.connection.end_service(reason, is_writer=not pool.staged.staging_bytes and member.role == m.ROLE_ENGINE)


def _row(member: Member, held: dict[int, dict[str, int]], budget: InputBudget, now_ns: int) -> dict[str, Any]:
    connection = member.connection
    holds = held.get(connection.id, {})
    sizes = {name: holds.get(name, 0) for name in ("leased_bytes", "reserved_bytes", "zombie_bytes", "announced_bytes")}
    return {
        "id": connection.id,
        "name": member.peer.name,
        "pid": member.peer.pid,
        "uid": member.peer.uid,
        "role": member.role,
        "model": member.model,
        "rank": member.rank,
        "age_s": round((now_ns - member.since_ns) / NS_PER_S, 1),
        "leases": holds.get("leases", 0),
        "reservations": holds.get("reservations", 0),
        "held_bytes": sum(sizes.values()),
        **sizes,
        "unread_bytes": budget.of(connection.id),
        "state": connection.state,
    }
