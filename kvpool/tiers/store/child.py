"""Store process: the client of the shared store, in a process of its own, because an abort in the library ends its process.

It has the memory that objects pass through, and a socket to the daemon (`wire`). It decides nothing and verifies nothing. It
ends when the daemon closes the socket, when the store cannot be reached at the start, or with the library.

Threads: the main one reads requests; one answers EXIST, some GET, one PUT, so that no kind waits for another. The library's
calls release the GIL and block; the daemon has the deadlines.
"""

import contextlib
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvpool.tiers.store import wire
from kvpool.tiers.store.mooncake_client import connect_mooncake

GET_THREADS = 2
READ_BYTES = 1 << 20
# Giving the segment back takes a moment; the library can also wait for a master that is away.
CLOSE_TIMEOUT_S = 2.0


class StoreClient(Protocol):
    """The library, with the shared memory registered. Each call answers a code for each name."""

    def exist(self, names: list[str]) -> list[int]:
        """1 for each object that is there."""
        ...

    def get(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Write objects to these offsets: their sizes."""
        ...

    def put(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Store what is at these offsets: 0 for each."""
        ...

    def close(self) -> None:
        """Leave the store."""
        ...


# Joins the store that the settings name, with this memory. Raises an exception with the reason where it cannot.
Connect = Callable[[Mapping[str, Any], mmap.mmap], StoreClient]
_Request = tuple[int, int, list[str], list[int], list[int]]


def serve(arguments: list[str], connect: Connect) -> None:
    """Serve a daemon until it closes the socket. `arguments`: descriptors of socket and memory, and its size."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon ends this process by closing the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link, memory_fd, size = socket.socket(fileno=int(arguments[0])), int(arguments[1]), int(arguments[2])
    frames = wire.Frames()
    with mmap.mmap(memory_fd, size) as memory:
        settings, *waiting = _read_first(link, frames)
        try:
            client = connect(settings, memory)
        except (ImportError, OSError, RuntimeError, ValueError, TypeError) as error:
            link.sendall(wire.pack([0, str(error)[:500] or type(error).__name__]))
            os._exit(1)
        link.sendall(wire.pack([0, ""]))
        _serve(link, frames, client, waiting)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
    os._exit(0)  # threads may be inside the library


def _read_first(link: socket.socket, frames: wire.Frames) -> list[Any]:
    """The daemon's first messages."""
    messages: list[Any] = []
    while not messages:
        more = link.recv(READ_BYTES)
        if not more:
            os._exit(0)
        messages = frames.feed(more)
    return messages


def _serve(link: socket.socket, frames: wire.Frames, client: StoreClient, waiting: list[_Request]) -> None:
    turn = threading.Lock()
    queues: list[queue.SimpleQueue[_Request]] = [queue.SimpleQueue() for _ in (wire.EXIST, wire.GET, wire.PUT)]
    threads = [wire.EXIST, wire.PUT, *[wire.GET] * GET_THREADS]
    for verb in threads:
        threading.Thread(target=_answer, args=(link, turn, client, queues[verb]), daemon=True).start()
    more = b""
    while True:
        for request in waiting:
            queues[request[1]].put(request)
        with contextlib.suppress(ConnectionError):
            more = link.recv(READ_BYTES)
        if not more:
            return
        waiting = frames.feed(more)
        more = b""


def _answer(
    link: socket.socket, turn: threading.Lock, client: StoreClient, requests: "queue.SimpleQueue[_Request]"
) -> None:
    while True:
        number, verb, names, offsets, sizes = requests.get()
        if verb == wire.EXIST:
            codes = client.exist(names)
        elif verb == wire.GET:
            codes = client.get(names, offsets, sizes)
        else:
            codes = client.put(names, offsets, sizes)
        with turn, contextlib.suppress(ConnectionError):
            link.sendall(wire.pack([number, [int(code) for code in codes]]))


if __name__ == "__main__":
    serve(sys.argv[1:], connect_mooncake)
