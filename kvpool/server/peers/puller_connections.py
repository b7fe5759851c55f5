"""Puller connections: other nodes that pull from this one, with their sessions, and the key by which their shares count.

A session lasts as long as something of it is under way, so that models and layouts that are only pulled no more are not in use.

Loop thread only. Invariant: a peer is known while a connection of it is, and a connection has exactly the sessions in use.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace

from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller
from kvpool.pool.pool import Pool

# Connections of engines count up from 1, and keys of other nodes from FIRST_PEER. Numbers of sessions are used again.
FIRST_CONNECTION = 1 << 31
FIRST_PEER = 3 << 30


@dataclass(slots=True)
class PullingPeer:
    """Another node, by whose `number` all its connections count together. `offers`: native ones, of `offered_bytes`."""

    number: ConnectionId
    connections: int = 0
    offers: int = 0
    offered_bytes: int = 0


@dataclass(slots=True)
class SessionInUse:
    """A session, and how many pulls, offers and further leases of it are under way."""

    session: EngineSession
    uses: int = 0


@dataclass(slots=True)
class PullerConnection:
    """A connection of another node, by its `number` on the control plane. `tasks`: pulls that have no answer yet."""

    number: int
    name: str
    peer: PullingPeer
    sessions: dict[tuple[str, bytes], SessionInUse] = field(default_factory=dict)
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    offered: dict[int, int] = field(default_factory=dict)  # native offers, by pull
    released: set[int] = field(default_factory=set)  # those that it needs no longer, until they are over
    is_gone: bool = False


class PullerConnections:
    """See the module."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._peers: dict[str, PullingPeer] = {}
        self._connected: dict[int, PullerConnection] = {}
        self._sessions = FIRST_CONNECTION
        self._numbers = FIRST_PEER
        self._free: deque[ConnectionId] = deque()  # numbers of sessions that have ended

    def __repr__(self) -> str:
        return f"<PullerConnections {len(self._connected)} of {len(self._peers)} peers>"

    def __getitem__(self, number: int) -> PullerConnection:
        return self._connected[number]

    def find(self, number: int) -> PullerConnection | None:
        """A connection that has pulled."""
        return self._connected.get(number)

    def all(self) -> list[PullerConnection]:
        """Every connection that has pulled."""
        return list(self._connected.values())

    def of(self, puller: Puller) -> PullerConnection:
        """The connection of a puller, which may pull for the first time."""
        known = self._connected.get(puller.number)
        if known is not None:
            return known
        name = puller.counted
        if name not in self._peers:
            self._numbers += 1
            self._peers[name] = PullingPeer(ConnectionId(self._numbers))
            self._pool.chains.readers.join_peers(self._peers[name].number)
        peer = self._peers[name]
        peer.connections += 1
        made = self._connected[puller.number] = PullerConnection(puller.number, name, peer)
        return made

    def begin_use(self, connection: PullerConnection, pull: r.Pull | r.Wrong) -> EngineSession | None:
        """The puller's session for a model and layout, in use until `end_use`; None where nobody has used them here."""
        layout = Layout.from_wire(pull.layout)
        identity = pull.model, layout.fingerprint()
        if identity not in connection.sessions:
            if self._pool.namespaces.find(pull.model, layout) is None:
                return None
            session = self._pool.open_session(self._new_session(), pull.model, layout)
            connection.sessions[identity] = SessionInUse(replace(session, peer=connection.peer.number))
        return self.use(connection, connection.sessions[identity].session)

    def use(self, connection: PullerConnection, session: EngineSession) -> EngineSession:
        """Use a session that is in use once more."""
        connection.sessions[_identity_of(session)].uses += 1
        return session

    def end_use(self, connection: PullerConnection, session: EngineSession) -> None:
        """Use a session no longer: with the last use it ends, and what it has leased."""
        used = connection.sessions[_identity_of(session)]
        used.uses -= 1
        if not used.uses:
            del connection.sessions[_identity_of(session)]
            self._pool.drop_connection(session.connection)
            self._free.append(session.connection)

    def drop_where_over(self, number: int) -> None:
        """Forget a connection that has ended, once nothing of it is under way."""
        connection = self._connected[number]
        if not connection.is_gone or connection.tasks or connection.offered or connection.sessions:
            return
        del self._connected[number]
        connection.peer.connections -= 1
        if not connection.peer.connections:
            self._pool.chains.readers.leave_peers(connection.peer.number)
            del self._peers[connection.name]

    def _new_session(self) -> ConnectionId:
        if self._free:
            return self._free.popleft()
        self._sessions += 1
        return ConnectionId(self._sessions)


def _identity_of(session: EngineSession) -> tuple[str, bytes]:
    return session.model, session.layout.fingerprint()
