"""Store process: the client of the shared store, in a process of its own, because an abort in the library ends its process.

It has the memory that objects pass through, and a socket to the daemon (`wire`). It decides nothing and verifies nothing. It
ends when the daemon closes the socket, when the store cannot be reached at the start, or with the library.

Threads: the main one reads requests; one answers EXIST, some GET, one PUT, so that no kind waits for another. The library's
calls release the GIL and block; the daemon has the deadlines.
"""

import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from kvpool.tiers.store import wire
from kvpool.tiers.store.mooncake_client import connect_mooncake
from kvpool.transfer.child import service
from kvpool.transfer.child.service import Connect, DaemonLink

GET_THREADS = 2


class StoreClient(Protocol):
    """The library, with the shared memory registered. Each call answers a code for each name."""

    facts: Mapping[str, Any]

    def exist(self, names: list[str]) -> list[int]:
        """1 for each object that is there."""

    def get(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Write objects to these offsets: their sizes."""

    def put(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Store what is at these offsets: 0 for each."""

    def close(self) -> None:
        """Leave the store."""


_Request = tuple[int, int, list[str], list[int], list[int]]


def serve(arguments: list[str], connect: Connect[StoreClient]) -> None:
    """Serve a daemon until it closes the socket. `connect`: joins the store that the settings name."""
    service.serve(arguments, connect, _serve)


def _serve(link: DaemonLink, client: StoreClient) -> None:
    queues: list[queue.SimpleQueue[_Request]] = [queue.SimpleQueue() for _ in (wire.EXIST, wire.GET, wire.PUT)]
    for verb in (wire.EXIST, wire.PUT, *[wire.GET] * GET_THREADS):
        threading.Thread(target=_answer, args=(link, client, queues[verb]), daemon=True).start()
    for number, verb, *rest in link.requests():
        names, offsets, sizes = rest
        queues[verb].put((number, verb, names, offsets, sizes))


def _answer(link: DaemonLink, client: StoreClient, requests: "queue.SimpleQueue[_Request]") -> None:
    while True:
        number, verb, names, offsets, sizes = requests.get()
        if verb == wire.EXIST:
            codes = client.exist(names)
        elif verb == wire.GET:
            codes = client.get(names, offsets, sizes)
        else:
            codes = client.put(names, offsets, sizes)
        link.answer(number, [int(code) for code in codes])


if __name__ == "__main__":
    serve(sys.argv[1:], connect_mooncake)
