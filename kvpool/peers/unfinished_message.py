"""Watch of a connection on which messages come: ends one that sends more than a bound without finishing a message.

ZMQ reads a message of many parts into memory until its last part has come, without a bound. So a duplicate of the connection's
descriptor is held, and now and then the kernel is asked how many bytes have come. What comes between two looks is what such a
peer can occupy. Loop thread only. Invariant: a look is due exactly while a duplicate is held.
"""

import asyncio
import ipaddress
import os
import socket
import struct
from collections.abc import Callable

LOOK_S = 0.25
# `tcpi_bytes_received` of struct tcp_info (linux/tcp.h), which Linux has had there since 4.1.
_BYTES_RECEIVED = struct.Struct("<Q")
_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 136
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def received_bytes(peer: socket.socket) -> int:
    """Bytes that a TCP connection has received since it began. Raises OSError for another one."""
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]) if len(info) >= _TCP_INFO_BYTES else 0


class UnfinishedMessage:
    """See the module. `on_excess`: called once, when too much has come."""

    def __init__(self, most: int, on_excess: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._most = most
        self._on_excess = on_excess
        self._loop = loop
        self._held: socket.socket | None = None
        self._next: asyncio.TimerHandle | None = None
        self._mark = 0
        self.has_spoken = False  # set with each whole message

    def __repr__(self) -> str:
        return f"<UnfinishedMessage {'watched' if self._held is not None else 'not watched'}>"

    def watch(self, descriptor: int, endpoint: str) -> None:
        """Watch the connection to this endpoint, unless it has ended and its number is something else's."""
        self.close()
        self._mark = 0
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
        if self.has_spoken:
            self._mark, self.has_spoken = received, False
        elif received - self._mark > self._most:
            self.close()
            self._on_excess()


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
