"""Frames between the daemon and a process of its own: a stream over a socket pair.

    frame := length (u32, little endian) msgpack
    daemon → process: first its settings, a map; then [number, …]
    process → daemon: first [0, error, facts], where an empty error says that it serves; then [number, codes]

`facts`: a map, what the daemon has to know of this life of the process. Answers come in any order. Pure functions; any thread.
"""

import struct
from typing import Any

import msgpack

from kvpool.errors import ProtocolError

FRAME_BYTES_MAX = 16 << 20
_LENGTH = struct.Struct("<I")


def pack(message: object) -> bytes:
    """The frame of a message."""
    body: bytes = msgpack.packb(message)
    assert len(body) <= FRAME_BYTES_MAX
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Messages in a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> list[Any]:
        """The messages that are complete now. Raises ProtocolError."""
        self._bytes += more
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a frame has {length} bytes, expected {FRAME_BYTES_MAX} at most")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            try:
                messages.append(msgpack.unpackb(bytes(self._bytes[_LENGTH.size : end])))
            except (ValueError, msgpack.UnpackException) as error:
                raise ProtocolError(f"a frame is no msgpack: {error}") from error
            del self._bytes[:end]
        return messages
