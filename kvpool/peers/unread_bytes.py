"""Unread bytes of a ZMQ connection: what has come over it and was not read as messages. A watch ends one that has too many.

ZMQ reads a message of many parts into memory until its last part has come, without a bound; and a bound on messages
(`ZMQ_RCVHWM`) must not be set on a socket that others can reach: with one, libzmq 4.3.5 has ended the process for what one
connection did. A duplicate of the connection's descriptor is held instead, now and then the kernel is asked how many
bytes have come, and each message that is read counts for as many as it had on the wire. What comes between two looks is what a
peer can occupy. Loop thread only. Invariant: a look is due exactly while a duplicate is held.
"""

import asyncio
import fcntl
import ipaddress
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterable

LOOK_S = 0.25
# Of each look, that count for no message: heartbeats, at the intervals of this project and twice as often.
HEARTBEAT_BYTES = 32
# Of a part: the command of CURVE around it, with its nonce, flags and authentication (CurveZMQ, rfc.zeromq.org/spec/26).
_CURVE_BYTES = 8 + 8 + 1 + 16
# A frame's flags and length (ZMTP 3.1, rfc.zeromq.org/spec/37).
_SHORT_BYTES, _LONG_BYTES, _SHORT_MAX = 2, 9, 255
# `tcpi_bytes_received` of struct tcp_info (<linux/tcp.h>), which Linux has had there since 4.1.
_BYTES_RECEIVED = struct.Struct("<Q")
_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 136
_COUNT = struct.Struct("i")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def received_bytes(peer: socket.socket) -> int:
    """Bytes that a TCP connection has received since it began. Raises OSError for another one."""
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]) if len(info) >= _TCP_INFO_BYTES else 0


def unread_bytes(peer: socket.socket) -> int:
    """Bytes that wait in the kernel until somebody reads them; 0 for a connection that has ended."""
    try:
        return int(_COUNT.unpack(fcntl.ioctl(peer, termios.FIONREAD, bytes(_COUNT.size)))[0])
    except OSError:
        return 0


def wire_bytes(sizes: Iterable[int], *, is_encrypted: bool) -> int:
    """Bytes that a message with parts of these sizes has on its connection."""
    total = 0
    for size in sizes:
        body = size + _CURVE_BYTES if is_encrypted else size
        total += body + (_SHORT_BYTES if body <= _SHORT_MAX else _LONG_BYTES)
    return total


class UnreadBytes:
    """Watch of one connection. `on_excess`: called once, when more than `most` bytes of it are not read."""

    def __init__(self, most: int, on_excess: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._most = most
        self._on_excess = on_excess
        self._loop = loop
        self._held: socket.socket | None = None
        self._next: asyncio.TimerHandle | None = None
        self._read = 0

    def __repr__(self) -> str:
        return f"<UnreadBytes {'watched' if self._held is not None else 'not watched'}>"

    def watch(self, descriptor: int, endpoint: str) -> None:
        """Watch the connection to this endpoint, unless it has ended and its number is something else's."""
        self.close()
        self._read = 0
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            return self._on_excess() if _has_none_left(descriptor) else None
        try:
            held = socket.socket(fileno=duplicate)  # Python's own `dup` would have it block, for ZMQ too
        except OSError:
            os.close(duplicate)
            return None
        try:
            is_there = held.family in _FAMILIES and _place_of(*held.getpeername()[:2]) == _place_of(
                *_parts_of(endpoint)
            )
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            held.close()
            return None
        self._held = held
        self._next = self._loop.call_later(LOOK_S, self._look)
        return None

    def note_read(self, size: int) -> None:
        """A message was read that had so many bytes on the wire."""
        self._read += size

    def close(self) -> None:
        """Watch no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._held is not None:
            self._held.close()
            self._held = None

    def _look(self) -> None:
        assert self._held is not None
        self._next = self._loop.call_later(LOOK_S, self._look)
        try:
            received = received_bytes(self._held)
        except OSError:
            return
        if received - self._read > self._most:
            self.close()
            self._on_excess()
        else:
            self._read = min(received, self._read + HEARTBEAT_BYTES)


def _parts_of(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, port


def _place_of(host: str, port: int | str) -> tuple[bytes, int]:
    """A numeric address and a port, whatever form they are written in. Raises ValueError."""
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).packed, int(port)


def _has_none_left(descriptor: int) -> bool:
    """Whether the process has no further descriptor, and the connection is there: then there is no bound on it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
