"""A greeter in the daemon's place: a socket that passes the daemon's welcome on, and then does what the test says."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tests.rigs.daemon import Daemon


class Greeter:
    """`before`: is waited for with a client that has connected; `serve`: has the client when it was greeted."""

    def __init__(
        self,
        directory: Path,
        daemon: Daemon,
        *,
        before: Callable[[], object] = lambda: None,
        serve: Callable[[socket.socket], object] = lambda _: None,
    ) -> None:
        self.path = str(directory / "greeter.sock")
        self._daemon, self._before, self._serve = daemon, before, serve
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Greeter":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in [*self._open, self._listener]:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(accepted)
            self._threads.append(threading.Thread(target=self._greet, args=(accepted,)))
            self._threads[-1].start()

    def _greet(self, accepted: socket.socket) -> None:
        self._before()
        behind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open.append(behind)
        behind.connect(self._daemon.socket)
        behind.sendall(accepted.recv(65536))
        welcome, fds, _, _ = socket.recv_fds(behind, 65536, 3)
        with contextlib.suppress(OSError):  # the client has given up
            socket.send_fds(accepted, [welcome], fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            self._serve(accepted)
