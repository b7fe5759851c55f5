"""Connection guard of the control server: the TCP connections below its ROUTER socket, and the right to end one.

ZMQ reads a message of many parts into memory until its last part has come, however many there are, and has no call that ends
a connection. So the guard follows the socket's monitor, holds a duplicate of each accepted connection's descriptor, and shuts
one down

- whose peer has sent more than `pending_bytes_max` since its last whole message;
- that `end` names: its peer breaks the protocol or sends too much.

ZMQ then sees an ordinary end of the connection. A number of a descriptor is used again after its connection has ended;
therefore a duplicate is held only if it is a connection of the listener's own port, and never anything else of this process.

Loop thread only. Invariant: `_connections` has no descriptor twice, and its duplicates are closed when ZMQ reports the end.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Collection

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpool.peers.control.loop_socket import LoopSocket

LOOK_S = 0.25
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
# `tcpi_bytes_received` of struct tcp_info (linux/tcp.h), which Linux has had there since 4.1.
_BYTES_RECEIVED = struct.Struct("<Q")
_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 136


class _Connection:
    """One accepted connection. `mark`: bytes received when a whole message was last seen."""

    __slots__ = ("has_spoken", "is_ended", "mark", "peer")

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.mark = 0
        self.has_spoken = True
        self.is_ended = False

    def received(self) -> int:
        """Bytes received since the connection began."""
        info = self.peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]) if len(info) >= _TCP_INFO_BYTES else 0


class ConnectionGuard:
    """See the module. `ended`: connections shut down until now."""

    def __init__(self, router: "zmq.Socket[bytes]", loop: asyncio.AbstractEventLoop, *, pending_bytes_max: int) -> None:
        """`router` is bound later, so that no connection is missed."""
        self._loop = loop
        self._pending_bytes_max = pending_bytes_max
        self._ports: Collection[int] = ()
        self._connections: dict[int, _Connection] = {}
        self._next: asyncio.TimerHandle | None = None
        self.ended = 0
        self._monitor = LoopSocket(router.get_monitor_socket(EVENTS), loop, self._take)

    def __len__(self) -> int:
        return len(self._connections)

    def watch(self, ports: Collection[int]) -> None:
        """The listener's own ports, known after it was bound and before the loop's next turn."""
        self._ports = ports

    def note_message(self, descriptor: int) -> None:
        """A whole message has come over this connection."""
        found = self._connections.get(descriptor)
        if found is not None:
            found.has_spoken = True

    def end(self, descriptor: int) -> None:
        """Shut a connection down, if it is one that is known."""
        found = self._connections.get(descriptor)
        if found is not None:
            self._shut_down(found)

    def end_all(self) -> None:
        """Shut every connection down: those that may will come again."""
        for found in self._connections.values():
            self._shut_down(found)

    def close(self) -> None:
        """Stop watching."""
        self._monitor.close()
        if self._next is not None:
            self._next.cancel()
        for found in self._connections.values():
            found.peer.close()
        self._connections.clear()

    def _take(self, parts: list[zmq.Frame]) -> None:
        event = parse_monitor_message([part.bytes for part in parts])
        descriptor = int(event["value"])
        former = self._connections.pop(descriptor, None)
        if former is not None:
            former.peer.close()
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        try:
            peer = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return  # it has ended already
        if self._is_ours(peer):
            self._connections[descriptor] = _Connection(peer)
            self._look_later()
        else:
            peer.close()

    def _is_ours(self, peer: socket.socket) -> bool:
        try:
            peer.getpeername()
            is_tcp = peer.type == socket.SOCK_STREAM and peer.family in (socket.AF_INET, socket.AF_INET6)
            return is_tcp and peer.getsockname()[1] in self._ports
        except OSError:
            return False

    def _look_later(self) -> None:
        if self._next is None and self._connections:
            self._next = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._next = None
        for found in self._connections.values():
            try:
                received = found.received()
            except OSError:
                continue
            if found.has_spoken:
                found.mark, found.has_spoken = received, False
            elif received - found.mark > self._pending_bytes_max:
                self._shut_down(found)
        self._look_later()

    def _shut_down(self, found: _Connection) -> None:
        """Once for each connection: messages that came before are still delivered, and may be as bad."""
        if found.is_ended:
            return
        found.is_ended = True
        try:
            found.peer.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already
        self.ended += 1
