"""Somebody between two nodes who changes the bytes of extents on a plain stream, and their marks with them."""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

from kvpool_native import crc32c

HELLO_BYTES = 64
MARK = struct.Struct("<IIIIQII")
EXTENT = 1
TIMEOUT_S = 30.0
Marks = Iterator[tuple[bytes, bytes]]


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
            for packed, extent in self._passed(_marks(owner)):
                puller.sendall(packed + extent)

    def _passed(self, marks: Marks) -> Marks:
        """What the puller gets of a connection's marks, each with its extent."""
        for packed, data in marks:
            magic, kind, chunk, extent, size, crc, _ = MARK.unpack(packed)
            changed = bytearray(data)
            if kind == EXTENT:
                changed[0] ^= 1
                crc = crc32c(bytes(changed))
                self.forged += 1
            head = MARK.pack(magic, kind, chunk, extent, size, crc, 0)[:-4]
            yield head + struct.pack("<I", crc32c(head)), bytes(changed)


class CuttingRelay(StreamRelay):
    """Ends the first connections, each after so many extents. Their bytes, and later connections, pass whole."""

    def __init__(self, stream: str, *extents: int) -> None:
        self._extents = list(extents)
        super().__init__(stream)

    def _passed(self, marks: Marks) -> Marks:
        left = self._extents.pop(0) if self._extents else -1
        while left and (mark := next(marks, None)) is not None:
            yield mark
            left -= MARK.unpack(mark[0])[1] == EXTENT


def _marks(owner: socket.socket) -> Marks:
    while len(packed := owner.recv(MARK.size, socket.MSG_WAITALL)) == MARK.size:
        yield packed, owner.recv(MARK.unpack(packed)[4], socket.MSG_WAITALL)
