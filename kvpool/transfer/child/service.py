"""Child's side of a child process: its settings, its memory, and the socket to the daemon.

It ends when the daemon closes the socket, when the library cannot be used at the start, with the library, or with any thread.
Threads: the main one reads requests; `answer` may be called by any.
"""

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from kvpool.transfer.child.frames import Frames, pack

READ_BYTES = 1 << 20
# The library may take a moment to give back what it has, or wait for somebody who is away.
CLOSE_TIMEOUT_S = 2.0


class Client(Protocol):
    """A library in use. `facts`: what the daemon has to know of it."""

    facts: Mapping[str, Any]

    def close(self) -> None:
        """Give back what it has."""
        ...


AnyClient = TypeVar("AnyClient", bound=Client)
# Begins to use the library as the settings say, with this memory. Raises an exception with the reason where it cannot.
Connect = Callable[[Mapping[str, Any], mmap.mmap], AnyClient]


class DaemonLink:
    """The socket to the daemon."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._frames = Frames()
        self._turn = threading.Lock()
        self._read: list[Any] = []

    def settings(self) -> Mapping[str, Any]:
        """The daemon's first message; ends the process where it sends none."""
        while not self._read:
            self._receive()
        settings: Mapping[str, Any] = self._read.pop(0)
        return settings

    def requests(self) -> Iterator[list[Any]]:
        """What the daemon asks, until it closes the socket."""
        while True:
            while self._read:
                yield self._read.pop(0)
            if not self._more():
                return

    def answer(self, *message: object) -> None:
        """Send a message, if the daemon still reads. Any thread."""
        with self._turn, contextlib.suppress(ConnectionError):
            self._link.sendall(pack(list(message)))

    def _receive(self) -> None:
        if not self._more():
            os._exit(0)

    def _more(self) -> bool:
        more = b""
        with contextlib.suppress(ConnectionError):
            more = self._link.recv(READ_BYTES)
        self._read += self._frames.feed(more)
        return bool(more)


def serve(arguments: list[str], connect: Connect[AnyClient], run: Callable[[DaemonLink, AnyClient], None]) -> None:
    """Serve a daemon until it closes the socket. `arguments`: descriptors of socket and memory, and its size. `run`: answers
    the requests, until there are no more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon ends this process by closing the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = _end_with_thread
    link, memory_fd, size = DaemonLink(socket.socket(fileno=int(arguments[0]))), int(arguments[1]), int(arguments[2])
    with mmap.mmap(memory_fd, size) as memory:
        try:
            client = connect(link.settings(), memory)
        except (ImportError, OSError, RuntimeError, ValueError, TypeError) as error:
            link.answer(0, str(error)[:500] or type(error).__name__, {})
            os._exit(1)
        link.answer(0, "", dict(client.facts))
        run(link, client)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
    os._exit(0)  # threads may be inside the library


def _end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """A thread that fails ends the process: the daemon starts another, instead of waiting for answers."""
    sys.excepthook(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)
