"""Guarded connection: what a connection guard knows of one accepted connection, and the bounds of all. Loop thread only."""

import socket
from dataclasses import dataclass

from kvpool.clock import Deadline


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Bounds of connections. `connections_max`: of nodes after their Hello; `strangers_max`: of others, a quarter of them
    from one source at most. `hello_s`: from the first packet to the Hello. `accepts_per_s`: from all sources and from one;
    twice and five times as many at once, for a fleet that starts. `is_greeted`: peers say Hello. Where they do not, who is
    still connected after `hello_s` was admitted: ZMQ ends a handshake sooner. `is_encrypted`: with CURVE."""

    unread_bytes_max: int
    first_bytes_max: int = 16 << 10
    connections_max: int = 1024
    strangers_max: int = 128
    hello_s: float = 10.0
    accepts_per_s: float = 200.0
    accepts_per_s_of_source: float = 20.0
    backlog_per_look_max: int = 1000
    arrivals_per_look_max: int = 1000
    is_greeted: bool = True
    is_encrypted: bool = False


class GuardedConnection:
    """One accepted connection. `hello`: until when its Hello has to come, None where it has. `route`: of its messages.
    `read`: bytes of messages that were read, and of heartbeats. `backlog`: messages read since the last look while
    others waited behind them; `arrivals`: of
    bytes since then; `seen`: the kernel's count at the last arrival."""

    __slots__ = (
        "arrivals",
        "backlog",
        "has_spoken",
        "hello",
        "is_ended",
        "number",
        "peer",
        "read",
        "route",
        "seen",
        "source",
    )

    def __init__(self, number: int, peer: socket.socket, source: bytes, hello: Deadline) -> None:
        self.number = number
        self.peer = peer
        self.source = source
        self.hello: Deadline | None = hello
        self.route = b""
        self.read = 0
        self.backlog = 0
        self.arrivals = 0
        self.seen = 0
        self.has_spoken = False
        self.is_ended = False
