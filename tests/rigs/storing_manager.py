"""A service manager's end of sd_notify that has a descriptor store, as systemd: it reads at once, in a thread of its own."""

import array
import os
import select
import socket
import threading
from pathlib import Path

from kvpool.tiers.dram.kept.keeper import FILES_MAX


class StoringManager:
    """Invariant: it has at most `room` descriptors; what it does not store it has closed when it reads on."""

    def __init__(self, address: str, room: int = FILES_MAX) -> None:
        self.address = address
        self.room = room
        self.received: list[list[str]] = []
        self._stored: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="storing-manager")
        self._thread.start()

    def __enter__(self) -> "StoringManager":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        self._thread.join()
        os.close(self._ended)
        self.forget()
        self._socket.close()
        Path(self.address).unlink(missing_ok=True)

    @property
    def stored(self) -> dict[str, int]:
        """What it has, by name."""
        with self._lock:
            return dict(self._stored)

    def take(self) -> None:
        """Read all that was sent before."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                message, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(64))
                descriptors = array.array("i")
                for _, _, data in ancillary:
                    descriptors.frombytes(data)
                self._do(message.decode().splitlines(), list(descriptors))

    def forget(self) -> None:
        """As a stop of the service: nothing is stored any more."""
        self.take()
        with self._lock:
            self._remove({name for name, _ in self._stored})

    def _run(self) -> None:
        while self._ended not in select.select([self._socket.fileno(), self._ended], [], [])[0]:
            self.take()

    def _do(self, lines: list[str], descriptors: list[int]) -> None:
        self.received.append(lines)
        name = next((line.partition("=")[2] for line in lines if line.startswith("FDNAME=")), "")
        if "FDSTOREREMOVE=1" in lines:
            self._remove({name})
        for descriptor in descriptors:
            is_known = any(os.path.sameopenfile(descriptor, other) for _, other in self._stored)
            if "FDSTORE=1" in lines and not is_known and len(self._stored) < self.room:
                self._stored.append((name, descriptor))
            else:
                os.close(descriptor)

    def _remove(self, names: set[str]) -> None:
        for name, descriptor in self._stored:
            if name in names:
                os.close(descriptor)
        self._stored = [one for one in self._stored if one[0] not in names]
