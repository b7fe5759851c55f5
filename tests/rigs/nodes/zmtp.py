"""ZMTP without keys, spoken by a test itself.

The protocol is ZMTP 3.1 (rfc.zeromq.org/spec/37).
"""

import fcntl
import socket
import struct
from pathlib import Path

from kvpool.clock import Deadline, MonotonicClock

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
# ZMTP 2.0, of a DEALER without a name.
GREETING_2 = b"\xff" + bytes(8) + b"\x7f\x01\x05" + bytes(2)
_SIOCOUTQ = 0x5411


def ready_of(kind: bytes, route: bytes = b"") -> bytes:
    """The command that ends a greeting, of a socket of this kind that claims a route."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    body += b"\x08Identity" + struct.pack(">I", len(route)) + route
    return b"\x04" + bytes([len(body)]) + body


def message_of(*parts: bytes) -> bytes:
    """A message as it is on a connection."""
    frames = []
    for number, part in enumerate(parts):
        more = number < len(parts) - 1
        is_long = len(part) > 255
        size = struct.pack(">Q", len(part)) if is_long else bytes([len(part)])
        frames.append(bytes([more | is_long << 1]) + size + part)
    return b"".join(frames)


def connection_to(endpoint: str) -> socket.socket:
    """A bare connection. Raises OSError."""
    if endpoint.startswith("ipc://"):
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            made.close()
            raise
    else:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        made = socket.create_connection((host, int(port)))
    made.settimeout(10.0)
    return made


def greeted(endpoint: str, kind: bytes, route: bytes = b"") -> socket.socket:
    """A connection after its greeting, as a socket of this kind. Raises OSError where it is not accepted."""
    made = connection_to(endpoint)
    try:
        made.sendall(GREETING)
        _receive(made, len(GREETING))
        made.sendall(ready_of(kind, route))
        _receive(made, 2)
    except OSError:
        made.close()
        raise
    return made


def _receive(made: socket.socket, size: int) -> None:
    while size:
        received = len(made.recv(size))
        if not received:
            raise ConnectionResetError("the other side has ended the connection")
        size -= received


def send_until_taken(made: socket.socket, sent: bytes) -> None:
    """Send, and wait until ZMQ on the other side has read a part of it, without a turn of an event loop of this one."""
    made.sendall(sent)
    until = Deadline(5.0, MonotonicClock())
    while _unread_of(made) > len(sent) // 2:
        assert not until.has_passed(), "nobody reads it"


def _unread_of(made: socket.socket) -> int:
    """Bytes that the other side, on this host, has not read."""
    if made.family == socket.AF_UNIX:
        return int(struct.unpack("i", fcntl.ioctl(made, _SIOCOUTQ, bytes(4)))[0])
    there, here = made.getpeername()[1], made.getsockname()[1]
    ends = f":{there:04X} ", f":{here:04X} "
    for line in Path("/proc/net/tcp").read_text().splitlines():
        local, remote, _, queues = line.split()[1:5]
        if f"{local} ".endswith(ends[0]) and f"{remote} ".endswith(ends[1]):
            return int(queues.partition(":")[2], 16)
    return 0
