"""Connection roster: all connections, open or in a handshake, and how many a user may have.

A user is a uid by the kernel (SO_PEERCRED). Beyond `max_connections`, OPERATOR_CONNECTIONS more are reserved for operators (see
`operators`), for the case that engines use all others. One user has at most `user_quota` of the connections that the other
users leave.

Control thread only. Invariants: `_of_user` counts the connections in `_members` and those in a handshake; a connection is in
one of the two alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpool.clock import Clock
from kvpool.errors import Refused
from kvpool.ids import ConnectionId
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.server.connections.connection import Connection
from kvpool.server.connections.local_socket import Peer

OPERATOR_CONNECTIONS = 2


@dataclass(frozen=True, slots=True)
class Member:
    """One connection and its peer. `rank` None: a scheduler, over all ranks, or an operator."""

    connection: Connection
    peer: Peer
    role: str
    model: str
    rank: int | None
    since_ns: int


class Roster:
    """All connections of one daemon. `is_operator`: whether a peer may use a connection reserved for operators."""

    def __init__(
        self,
        max_connections: int,
        user_quota: float,
        clock: Clock,
        is_operator: Callable[[Peer], bool],
    ) -> None:
        self._max = max_connections
        self._user_quota = user_quota
        self._clock = clock
        self._is_operator = is_operator
        self._members: dict[ConnectionId, Member] = {}
        self._of_user: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Roster {len(self._members)} of {self._max} connections>"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def find(self, connection: ConnectionId) -> Member | None:
        """A connection's member, if it is open."""
        return self._members.get(connection)

    def begin_handshake(self, peer: Peer) -> None:
        """Count a peer's connection from its handshake on. Raises Refused where it is beyond a limit."""
        used = self._of_user.total()
        if used >= self._max + (OPERATOR_CONNECTIONS if self._is_operator(peer) else 0):
            raise self._full()
        own = self._of_user[peer.uid]
        limit = max(1, int(self._user_quota * (self._max - (used - own))))
        if own >= limit and not self._is_operator(peer):
            raise Refused(
                "busy",
                f"uid {peer.uid} has {own} connections, all that one user may have now (server.user_quota is "
                f"{self._user_quota:g}, server.max_connections {self._max})",
            )
        self._of_user[peer.uid] += 1

    def check_role(self, peer: Peer, role: str) -> None:
        """Raises Refused for a connection that is reserved for operators and has another role."""
        del peer
        if role != m.ROLE_ADMIN and self._of_user.total() > self._max:
            raise self._full()

    def end_handshake(self, peer: Peer) -> None:
        """Remove a connection that began and was never added."""
        self._of_user[peer.uid] -= 1
        if not self._of_user[peer.uid]:
            del self._of_user[peer.uid]

    def add_connection(self, connection: Connection, peer: Peer, hello: m.Hello) -> None:
        """Add a connection whose handshake has succeeded."""
        rank = Layout.from_wire(hello.layout).rank if hello.role == m.ROLE_ENGINE else None
        self._members[connection.id] = Member(connection, peer, hello.role, hello.model, rank, self._clock.now_ns())

    def remove(self, connection: ConnectionId) -> Member | None:
        """A connection has ended."""
        member = self._members.pop(connection, None)
        if member is not None:
            self.end_handshake(member.peer)
        return member

    def count_roles(self) -> dict[str, int]:
        """Open connections by role."""
        roles = Counter(member.role for member in self._members.values())
        return {role: roles[role] for role in (m.ROLE_ENGINE, m.ROLE_ADMIN, m.ROLE_PEER)}

    def _full(self) -> Refused:
        return Refused("busy", f"server.max_connections is {self._max} and all are in use")
