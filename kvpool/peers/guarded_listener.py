"""Guarded listener: the TCP socket from which ZMQ accepts, made here so that a filter can be put on it, and its context.

ZMQ makes its listening sockets itself unless it gets one; the accept gate needs one that is known. A listener is this process's
own, ZMQ has a duplicate of it.
"""

import ctypes
import os
import socket

import zmq

from kvpool.config.addresses import ZmqAddress

# Connections that the kernel holds until ZMQ accepts them: as many may come in one turn of the loop.
BACKLOG = 128
# ZMQ_ZERO_COPY_RECV (zmq_ctx_set(3)), which the binding does not name.
_ZERO_COPY_RECV = 10


def context_for_others() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context whose sockets others may reach.

    The routes that ZMQ makes shall not be foreseen by others; it takes the first from the C library's `rand`, so the seed comes
    from here. And a message is copied out of the buffer it was read into: ZMQ
    would keep 8 KiB for each message of 36 bytes that waits.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    made.set(_ZERO_COPY_RECV, 0)
    return made


def descriptor_of(part: zmq.Frame) -> int:
    """The descriptor of the connection over which a message came; -1 for a peer that speaks ZMTP 1 or 2, of which ZMQ does not
    say it."""
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def listen(option: str, address: ZmqAddress) -> socket.socket:
    """Listen at a TCP address. Raises OSError that names the option."""
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    made = socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host.strip("[]"), int(port)))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"{option} {address} cannot be bound: {error.strerror}") from error
    made.setblocking(False)
    return made


def accept_from(accepting: "zmq.Socket[bytes]", option: str, listening: socket.socket) -> str:
    """Have ZMQ accept from a listening socket: its endpoint. Raises OSError that names the option."""
    host, port = listening.getsockname()[:2]
    endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    accepting.setsockopt(zmq.IPV6, int(":" in host))
    duplicate = listening.dup()
    accepting.setsockopt(zmq.USE_FD, duplicate.fileno())
    try:
        accepting.bind(endpoint)
    except zmq.ZMQError as error:
        duplicate.close()
        raise OSError(error.errno, f"{option} {endpoint} cannot be bound: {error.strerror}") from error
    duplicate.detach()  # it is ZMQ's
    return endpoint
