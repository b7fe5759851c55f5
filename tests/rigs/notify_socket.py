"""A service manager's end of sd_notify: a datagram socket that records what it receives, in order."""

import select
import socket
from pathlib import Path

from tests.rigs.daemon import wait_until


class NotifySocket:
    """A bound socket; `received` holds the datagrams read so far, each as its lines."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.received: list[list[str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def __enter__(self) -> "NotifySocket":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if not self.address.startswith("@"):
            Path(self.address).unlink(missing_ok=True)

    def take(self) -> list[list[str]]:
        """The datagrams received since the last call."""
        fresh = []
        while select.select([self._socket], [], [], 0)[0]:
            fresh.append(self._socket.recv(65536).decode().splitlines())
        self.received += fresh
        return fresh

    def count(self, line: str) -> int:
        """How often `line` has been received so far."""
        self.take()
        return sum(line in lines for lines in self.received)

    def wait_for(self, line: str, times: int = 1, timeout_s: float = 180.0) -> None:
        """Wait until `line` has been received `times` more times."""
        before = self.count(line)
        wait_until(lambda: self.count(line) >= before + times, f"{line} is received {times} times", timeout_s)
