"""Somebody between two nodes who changes the bytes of layers on a plain stream, and their marks with them."""

import socket
import struct
from contextlib import suppress
from threading import Thread

from kvpool_native import crc32c

HELLO_BYTES = 64
MARK = struct.Struct("<IIIIQII")
EXTENT = 1
TIMEOUT_S = 30.0


class StreamRelay:
    """Takes connections for a stream listener, and flips a bit of each layer. `forged`: layers with other bytes."""

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
            while len(packed := owner.recv(MARK.size, socket.MSG_WAITALL)) == MARK.size:
                magic, kind, chunk, layer, size, crc, _ = MARK.unpack(packed)
                extent = bytearray(owner.recv(size, socket.MSG_WAITALL))
                if kind == EXTENT:
                    extent[0] ^= 1
                    crc = crc32c(bytes(extent))
                    self.forged += 1
                head = MARK.pack(magic, kind, chunk, layer, size, crc, 0)[:-4]
                puller.sendall(head + struct.pack("<I", crc32c(head)) + extent)


class CuttingRelay:
    """Takes connections for a stream listener, and ends the first ones: each after so many extents. Later ones pass whole."""

    def __init__(self, stream: str, *extents: int) -> None:
        host, _, port = stream.rpartition("/")[2].rpartition(":")
        self._owner = host, int(port)
        self._extents = list(extents)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                puller, _ = self._listener.accept()
                most = self._extents.pop(0) if self._extents else 1 << 62
                Thread(target=self._relay, args=(puller, most), daemon=True).start()

    def _relay(self, puller: socket.socket, most: int) -> None:
        with suppress(OSError), puller, socket.create_connection(self._owner, TIMEOUT_S) as owner:
            puller.settimeout(TIMEOUT_S)
            owner.sendall(puller.recv(HELLO_BYTES, socket.MSG_WAITALL))
            while most and len(packed := owner.recv(MARK.size, socket.MSG_WAITALL)) == MARK.size:
                _, kind, _, _, size, _, _ = MARK.unpack(packed)
                most -= kind == EXTENT
                puller.sendall(packed + owner.recv(size, socket.MSG_WAITALL))
