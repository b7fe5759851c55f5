"""Wire between the daemon and its store process: a stream of frames over a socket pair.

    frame := length (u32, little endian) msgpack
    daemon → process: first its settings, a map; then [number, verb, names, offsets, sizes]
    process → daemon: first [0, error], where an empty error says that it serves; then [number, codes]

Verbs: EXIST (a code of 1: it is there), GET and PUT, whose objects are at these offsets of the shared memory, with these sizes.
A code is the size of what was got, 0 for what was put, or negative, as the library answers. Answers come in any order. Pure
functions; any thread.
"""

import struct
from typing import Any

import msgpack

from kvpool.errors import ProtocolError

EXIST, GET, PUT = range(3)
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
