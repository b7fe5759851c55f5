"""Pullers: the connections of a control server whose Hello was accepted, and what each may still ask.

A connection is known by ZMQ's routing id, and its peer by the authenticated key (without keys: by the connection). Where that
is this node's own key the fleet shares one pair, and a peer is known by the name in its Hello beside the key, for so many names
as there may be nodes. All bounds are by peer, so that more connections give nobody more. One that is silent for `idle_s` is
forgotten, and so is an earlier connection of a node that says Hello again.

Loop thread only. Invariant: `_by_route` holds exactly the connections whose Hello was accepted and that were not forgotten; at
most `connections_max`, and `per_peer_max` of one peer.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvpool.clock import Clock, Deadline

# Names under a key that a fleet shares; further ones are one peer together.
NODES_PER_KEY = 200


@dataclass(frozen=True, slots=True)
class Puller:
    """Another node's connection, as requests are served for it. `key`: its public key in hexadecimal, empty without keys.
    `number`: of the connection, never the same twice. `peer`: by which its bounds are counted. `host`: the address that its
    connection comes from, empty where there is none."""

    node: str
    incarnation: bytes
    key: str
    number: int
    peer: str = ""
    host: str = ""

    @property
    def counted(self) -> str:
        """The identity by which it counts: another node cannot take it, as it can the name in a Hello."""
        return self.peer or str(self.number)


@dataclass(slots=True)
class Connection:
    """State of a connection. `number`: by which the listener knows it. `sequence` and `pull`: the last numbers seen. `waiting`:
    pulls without an answer yet, and the sequence number and deadline of each. `stages`: deadlines of unanswered Stages, by
    sequence number. `follow`: those of the unanswered request about this node's keys, if there is one."""

    route: bytes
    peer: str
    puller: Puller
    number: int
    idle: Deadline
    sequence: int
    pull: int = 0
    waiting: dict[int, tuple[int, Deadline]] = field(default_factory=dict)
    stages: dict[int, Deadline] = field(default_factory=dict)
    follow: tuple[int, Deadline] | None = None


class Pullers:
    """See the module."""

    def __init__(
        self, clock: Clock, *, connections_max: int, per_peer_max: int, idle_s: float, shared_key: str = ""
    ) -> None:
        """`shared_key`: this node's own, in hexadecimal."""
        self._clock = clock
        self._connections_max = connections_max
        self._per_peer_max = per_peer_max
        self._idle_s = idle_s
        self._shared_key = shared_key
        self._by_route: OrderedDict[bytes, Connection] = OrderedDict()
        self._by_number: dict[int, Connection] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._by_route)

    def all(self) -> list[Connection]:
        """Every connection, the one that was silent for longest first."""
        return list(self._by_route.values())

    def of_route(self, route: bytes) -> Connection | None:
        """The connection, which has just spoken."""
        found = self._by_route.get(route)
        if found is not None:
            found.idle = Deadline(self._idle_s, self._clock)
            self._by_route.move_to_end(route)
        return found

    def of_number(self, number: int) -> Connection | None:
        """The connection that the listener knows by this number."""
        return self._by_number.get(number)

    def peer_of(self, peer: str, *, node: str, key: str) -> str:
        """The peer that a node is whose Hello came from the `peer` of a key."""
        if not key or key != self._shared_key:
            return peer
        known, named = {one.peer for one in self._by_route.values() if one.puller.key == key}, f"{peer}/{node}"
        return named if named in known or len(known) < NODES_PER_KEY else peer

    def is_shared(self, key: str) -> bool:
        """Whether a key says nothing about which node has it."""
        return key in ("", self._shared_key)

    def replaced_by(self, route: bytes, peer: str, *, node: str, key: str) -> list[Connection]:
        """The connections that a Hello ends: its own former one, those of the same node, and the oldest beyond its peer's
        share."""
        known = self._by_route.values()
        ended = [one for one in known if one.route == route or (one.puller.node, one.puller.key) == (node, key)]
        others = [one for one in known if one.peer == peer and one not in ended]
        return ended + others[: max(0, len(others) + 1 - self._per_peer_max)]

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another connection."""
        return len(self) >= self._connections_max

    def add_connection(
        self,
        route: bytes,
        peer: str,
        *,
        node: str,
        incarnation: bytes,
        key: str,
        number: int,
        sequence: int,
        host: str = "",
    ) -> Connection:
        """A connection whose Hello was accepted. REQUIRES: room, and those that it replaces are forgotten."""
        assert not self.is_full
        assert route not in self._by_route
        assert number not in self._by_number
        self._numbers += 1
        puller = Puller(node, incarnation, key, self._numbers, peer, host)
        idle = Deadline(self._idle_s, self._clock)
        made = self._by_route[route] = Connection(route, peer, puller, number, idle, sequence)
        self._by_number[number] = made
        return made

    def forget(self, connection: Connection) -> bool:
        """The connection is no longer known. Whether it was."""
        self._by_number.pop(connection.number, None)
        return self._by_route.pop(connection.route, None) is not None

    def idle(self) -> list[Connection]:
        """Connections that were silent for too long."""
        found = []
        for connection in self._by_route.values():
            if not connection.idle.has_passed():
                break
            found.append(connection)
        return found

    def waiting_of(self, peer: str) -> int:
        """Pulls and Stages of a peer without an answer yet, over all of its connections."""
        return sum(len(found.waiting) + len(found.stages) for found in self._by_route.values() if found.peer == peer)
