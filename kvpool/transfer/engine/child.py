"""Process of TransferEngine: reads other nodes' bounce buffers into its own, because an abort in the library ends its process.

    daemon → process: [number, server, offset, address, size]: read so many bytes there into the memory at this offset
    process → daemon: [number, [code]], 0 where they have come; once nothing of it can write into the memory any more

A server that accepts a connection and never answers keeps the library, and every other read with it, for a minute. After
SUBMIT_S the process therefore names that read (HUNG) and ends.

It verifies nothing: the daemon does, and has the deadlines. A read goes in pieces, each an asynchronous call of its own,
because the library shows the state of a call's first piece alone.

Threads: the main one reads requests; one submits, for the library may wait there for a node that is away; one looks after what
was submitted, with naps, because the library's own waiting keeps a core busy.
"""

import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.clock import Deadline
from kvpool.transfer.child.service import DaemonLink, serve
from kvpool.transfer.engine.library import connect_engine

# Of a piece: beyond a MiB the library is no faster (measured), and others get their turn between pieces.
PIECE_BYTES = 4 << 20
# Pieces that were submitted and have not ended: the library refuses more than a thousand of one node.
PIECES_MAX = 64
NAP_S = 100e-6
# The longest time for the library to begin a read. Setting up a connection over emulated RDMA takes 1.5 s (measured).
SUBMIT_S = 8.0
HUNG = -2
# Between two looks at the library where nothing was submitted.
LOOK_S = 0.5
# After which so long a nap is no loss.
PATIENCE_S = 2e-3


class ReadClient(Protocol):
    """The library, with the shared memory registered."""

    facts: Mapping[str, Any]

    def submit(self, server: str, offset: int, address: int, size: int) -> int:
        """Begin to read; a number, 0 where it cannot."""
        ...

    def look(self, number: int) -> int:
        """1: it has come, -1: it has failed; then the number is void. 0: neither yet."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(slots=True)
class _Read:
    """A read under way. `left`: pieces that have not ended, and one for who submits them."""

    number: int
    left: int = 1
    code: int = 0


class _Reads:
    """Reads under way. Guarded by `_changed`: all of it but the queue."""

    def __init__(self, link: DaemonLink, client: ReadClient) -> None:
        self._link = link
        self._client = client
        self._asked: queue.SimpleQueue[tuple[_Read, str, int, int, int]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pieces: list[tuple[int, _Read]] = []
        self._submitted: tuple[_Read, Deadline] | None = None  # what the library is about to begin

    def queue_read(self, number: int, *request: Any) -> None:
        """Queue a read. The daemon asks for no more at once than its memory has room for."""
        server, offset, address, size = request
        self._asked.put((_Read(number), server, offset, address, size))

    def submit_all(self) -> None:
        """Submit what is asked for. A thread of its own."""
        while True:
            read, server, offset, address, size = self._asked.get()
            for done in range(0, size, PIECE_BYTES):
                with self._changed:
                    while len(self._pieces) >= PIECES_MAX:
                        self._changed.wait(PATIENCE_S)
                    if read.code:
                        break
                    self._submitted = (read, Deadline(SUBMIT_S))
                piece = min(PIECE_BYTES, size - done)
                number = self._client.submit(server, offset + done, address + done, piece)
                with self._changed:
                    self._submitted = None
                    if number:
                        read.left += 1
                        self._pieces.append((number, read))
                        self._changed.notify_all()
                    else:
                        read.code = -1
            self._end_piece(read, 0)

    def look_after(self) -> None:
        """Report what has ended. A thread of its own."""
        while True:
            with self._changed:
                if not self._pieces:
                    self._changed.wait(LOOK_S)
                self._end_where_hung()
                pieces = list(self._pieces)
            ended = [(piece, code) for piece in pieces if (code := self._client.look(piece[0]))]
            with self._changed:
                for piece, _ in ended:
                    self._pieces.remove(piece)
                if pieces and not ended:
                    self._changed.wait(NAP_S)
                elif ended:
                    self._changed.notify_all()
            for (_, read), code in ended:
                self._end_piece(read, min(code, 0))

    def _end_where_hung(self) -> None:
        if self._submitted is not None and self._submitted[1].has_passed():
            self._link.answer(self._submitted[0].number, [HUNG])
            os._exit(1)

    def _end_piece(self, read: _Read, code: int) -> None:
        with self._changed:
            read.code = read.code or code
            read.left -= 1
            is_over = not read.left
        if is_over:
            self._link.answer(read.number, [read.code])


def run(link: DaemonLink, client: ReadClient) -> None:
    """Read what the daemon asks for."""
    reads = _Reads(link, client)
    for work in (reads.submit_all, reads.look_after):
        threading.Thread(target=work, daemon=True).start()
    for number, *request in link.requests():
        reads.queue_read(number, *request)


if __name__ == "__main__":
    serve(sys.argv[1:], connect_engine, run)
