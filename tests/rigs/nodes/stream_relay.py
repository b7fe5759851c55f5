"""Somebody between two nodes who changes the bytes of extents on a plain stream, and their marks with them.

What an owner sends behind one mark is sent on with a mark for each extent, which is a stream too.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

from kvpool_native import crc32c

HELLO_BYTES = 64
MARK = struct.Struct("<IIIIQII")
RUN = struct.Struct("<III")
MAGIC = 0x4D50564B
EXTENTS, WAITING = 1, 2
TIMEOUT_S = 30.0
# Chunk and number of an extent with its bytes, or a chunk's end (0, no bytes); None: the owner waits.
Extents = Iterator[tuple[int, int, bytes] | None]


class StreamRelay:
    """Takes connections for a stream listener, and flips a bit of each extent. `forged`: extents with other bytes."""

    def __init__(self, stream: str) -> None:
        host, _, port = stream.rpartition("/")[2].rpartition(":")
        self._owner = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.forged = 0
        Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                puller, _ = self._listener.accept()
                Thread(target=self._relay, args=(puller,), daemon=True).start()

    def _relay(self, puller: socket.socket) -> None:
        with suppress(OSError), puller, socket.create_connection(self._owner, TIMEOUT_S) as owner:
            puller.settimeout(TIMEOUT_S)
            owner.sendall(puller.recv(HELLO_BYTES, socket.MSG_WAITALL))
            for extent in self._passed(_extents(owner)):
                puller.sendall(_mark(WAITING) if extent is None else _packed(*extent))

    def _passed(self, extents: Extents) -> Extents:
        """What the puller gets of a connection's extents."""
        for extent in extents:
            if extent is None or not extent[2]:
                yield extent
                continue
            chunk, number, data = extent
            changed = bytearray(data)
            changed[0] ^= 1
            self.forged += 1
            yield chunk, number, bytes(changed)


class CuttingRelay(StreamRelay):
    """Ends the first connections, each after so many extents. Their bytes, and later connections, pass whole."""

    def __init__(self, stream: str, *extents: int) -> None:
        self._extents = list(extents)
        super().__init__(stream)

    def _passed(self, extents: Extents) -> Extents:
        left = self._extents.pop(0) if self._extents else -1
        for extent in extents if left else ():
            yield extent
            left -= extent is not None and bool(extent[2])
            if not left:
                return


def _extents(owner: socket.socket) -> Extents:
    while len(packed := owner.recv(MARK.size, socket.MSG_WAITALL)) == MARK.size:
        _, kind, runs, extents, size, _, _ = MARK.unpack(packed)
        if kind == WAITING:
            yield None
            continue
        table = owner.recv(runs * RUN.size + 4 * extents, socket.MSG_WAITALL)
        for chunk, first, count in RUN.iter_unpack(table[: runs * RUN.size]):
            if not count:
                yield chunk, 0, b""
            for number in range(first, first + count):
                yield chunk, number, owner.recv(size // extents, socket.MSG_WAITALL)


def _packed(chunk: int, number: int, data: bytes) -> bytes:
    table = RUN.pack(chunk, number, bool(data)) + (struct.pack("<I", crc32c(data)) if data else b"")
    return _mark(EXTENTS, 1, bool(data), len(data), crc32c(table)) + table + data


def _mark(kind: int, *numbers: int) -> bytes:
    head = MARK.pack(MAGIC, kind, *(numbers or (0, 0, 0, 0)), 0)[:-4]
    return head + struct.pack("<I", crc32c(head))
