"""Impostor: who answers at the socket of a daemon in its stead, with descriptors of the test's choice or with nothing.

The daemon's socket lies beside meanwhile, and is back at the end. Its connections stay open, so that what was mapped by way of
them stays mapped.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvpool.protocol import versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from tests.rigs.daemon import Daemon

# A daemon's welcome and descriptors into those that are passed on.
Twist = Callable[[m.Welcome, list[int]], tuple[m.Welcome, list[int]]]


def peer_hello() -> m.Hello:
    """The hello of another daemon of this host."""
    return m.Hello(m.MAGIC, versions.NEWEST, m.ROLE_PEER, "", [], versions.NEWEST)


class Impostor:
    """See the module. `twist` None: it accepts, and never answers. `greeted`: how often it was asked."""

    def __init__(self, daemon: Daemon, twist: Twist | None) -> None:
        self._path = daemon.socket
        self._twist = twist
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="impostor")
        self._stack = ExitStack()
        self.greeted = 0

    @property
    def _beside(self) -> str:
        return f"{self._path}.beside"

    def __enter__(self) -> "Impostor":
        os.rename(self._path, self._beside)
        self._listener.bind(self._path)
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        self._listener.close()
        self._stack.close()
        os.rename(self._beside, self._path)

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # the end
                return
            self._stack.callback(accepted.close)
            if accepted.recv(1 << 16):
                self.greeted += 1
                if self._twist is not None:
                    self._greet(accepted, self._twist)

    def _greet(self, accepted: socket.socket, twist: Twist) -> None:
        real = BlockingConnection(self._beside, peer_hello(), 5.0)
        self._stack.callback(real.close)
        welcome, fds = twist(real.welcome, list(real.fds))
        socket.send_fds(accepted, [m.encode(replace(welcome, protocol=versions.NEWEST), 0)], fds)
