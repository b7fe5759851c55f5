"""Process of a library that moves bytes between nodes' bounce buffers, because an abort in the library ends its process.

    daemon → process: [number, "move", other, offset, address, size, mark]: move so many bytes between the memory at this
                      offset and that address of another node's. TransferEngine reads them from there, NIXL writes them there,
                      and notifies it of the mark behind them
                      [number, "expect", mark]: another one will notify this one of the mark
                      [0, "call off", mark]: it will not
                      [number, "ping"]: answered by the thread that calls the library, if it does not hang there
    process → daemon: [number, [code]], 0 where they have moved, or the mark was heard; once nothing of it can write into any
                      memory any more. UNBEGUN: nothing of it has moved. Behind a move's code: how many agents were met

A server that accepts a connection and never answers keeps TransferEngine, and every other read with it, for a minute. After
SUBMIT_S the process therefore names that move (HUNG) and ends.

It verifies nothing: the daemon does, and has the deadlines. A move goes in pieces, each an asynchronous call of its own,
because TransferEngine shows the state of a call's first piece alone.

Threads: the main one reads requests; one submits, for the library may wait there for a node that is away; one looks after what
was submitted or is expected, with naps, because the library's own waiting keeps a core busy.
"""

import mmap
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.clock import Deadline
from kvpool.transfer.child.service import DaemonLink, serve
from kvpool.transfer.engine.library import connect_engine
from kvpool.transfer.engine.nixl import connect_nixl

# Of a piece: beyond a MiB TransferEngine is no faster, beyond 4 NIXL neither (measured), and others get their turn between
# pieces.
PIECE_BYTES = 4 << 20
# Pieces that were submitted and have not ended: the library of TransferEngine refuses more than a thousand of one node.
PIECES_MAX = 64
# Of one node, so that one that takes nothing does not keep the others.
NODE_PIECES_MAX = 32
NAP_S = 100e-6
# Where this process only waits for what others write: they are as fast (measured).
EXPECTING_NAP_S = 300e-6
# While nothing has come or gone for so long: an owner may be away, and what it was asked to write in quarantine.
QUIET_S = 1.0
QUIET_NAP_S = 5e-3
# The longest time for the library to begin a move. Setting up a connection over emulated RDMA takes 1.5 s (measured).
SUBMIT_S = 8.0
HUNG = -2
MOVE, EXPECT, CALL_OFF, PING = "move", "expect", "call off", "ping"
CALLED_OFF = -3
UNBEGUN = -4
# Marks that nobody has expected yet: an owner may be faster than this process is with its own daemon's request.
EARLY_MAX = 1024
# Between two looks at the library where nothing was submitted.
LOOK_S = 0.5
# After which so long a nap is no loss.
PATIENCE_S = 2e-3
# NIXL moves only while it is asked: what it has to send behind the last of its work goes within this time.
LINGER_S = 0.02


class Notices(Protocol):
    """How one agent notifies another that it has written."""

    def notify(self, other: Any, mark: bytes) -> bool:
        """Notify another one of a mark, behind all that has been written there. False where it cannot."""
        ...

    def heard(self) -> list[bytes]:
        """Marks that others have sent. The library moves on, too."""
        ...


class MoveClient(Protocol):
    """The library, with the shared memory registered."""

    facts: Mapping[str, Any]
    met: int  # agents, whose descriptors the library keeps

    @property
    def notices(self) -> Notices | None:
        """Of a library that writes."""
        ...

    def submit(self, other: Any, offset: int, address: int, size: int) -> int:
        """Begin to move bytes between the memory and another one's; a number, 0 where that has failed, less where nothing of it
        has begun."""
        ...

    def look(self, number: int) -> int:
        """1: they have moved, -1: it has failed; then the number is void. 0: neither yet."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(slots=True, eq=False)
class _Move:
    """A move under way. `begun`: bytes of it that were submitted. `left`: pieces that have not ended, and one for who submits
    them."""

    number: int
    other: Any
    offset: int
    address: int
    size: int
    mark: bytes
    begun: int = 0
    left: int = 1
    code: int = 0

    @property
    def node(self) -> str:
        """Whose bytes move, or where to: TransferEngine's server, or the peer of NIXL's agent."""
        return self.other if isinstance(self.other, str) else str(self.other[0])


class _Moves:
    """Moves under way, and marks that are expected. Guarded by `_changed`: all of it."""

    def __init__(self, link: DaemonLink, client: MoveClient) -> None:
        self._link = link
        self._client = client
        self._changed = threading.Condition()
        self._asked: deque[_Move] = deque()  # with pieces that were not submitted
        self._pieces: list[tuple[int, _Move]] = []
        self._pings: list[int] = []
        self._expected: dict[bytes, int] = {}
        self._early: OrderedDict[bytes, None] = OrderedDict()  # marks that were heard before they were expected here
        self._lingers = Deadline(0.0)
        self._quiet = Deadline(0.0)
        self._submitted: tuple[_Move, Deadline] | None = None  # what the library is about to begin

    def take_request(self, number: int, kind: str, *request: Any) -> None:
        """Queue a move or a ping, expect a mark, or expect it no longer. The daemon asks for no more at once than its memory
        has room for."""
        if kind == MOVE:
            with self._changed:
                self._asked.append(_Move(number, *request))
                self._changed.notify_all()
            return
        if kind == PING:
            with self._changed:
                self._pings.append(number)
                self._changed.notify_all()
            return
        (mark,) = request
        with self._changed:
            if kind == EXPECT and mark not in self._early:
                self._expected[mark] = number
                self._quiet = Deadline(QUIET_S)
                self._changed.notify_all()
                return
            self._early.pop(mark, None)
            number = number or self._expected.pop(mark, 0)
        if number:
            self._link.answer(number, [0 if kind == EXPECT else CALLED_OFF])

    def submit_all(self) -> None:
        """Submit what is asked for. A thread of its own."""
        while True:
            with self._changed:
                while (move := self._next_move()) is None:
                    self._changed.wait(PATIENCE_S if self._asked else None)
                self._submitted = (move, Deadline(SUBMIT_S))
            begun, piece = move.begun, min(PIECE_BYTES, move.size - move.begun)
            number = 0
            if not move.code:
                number = self._client.submit(move.other, move.offset + begun, move.address + begun, piece)
            with self._changed:
                self._submitted = None
                if number > 0:
                    move.begun += piece
                    move.left += 1
                    self._pieces.append((number, move))
                    self._quiet = Deadline(QUIET_S)
                    self._changed.notify_all()
                else:
                    move.code = move.code or (UNBEGUN if number < 0 and not begun else -1)
                is_submitted = move.code != 0 or move.begun == move.size
                if is_submitted:
                    self._asked.remove(move)
            if is_submitted:
                self._end_piece(move, 0)

    def _next_move(self) -> _Move | None:
        """The first move of which a piece can be submitted now. REQUIRES: `_changed` is held."""
        if len(self._pieces) >= PIECES_MAX:
            return None
        pieces = Counter(move.node for _, move in self._pieces)
        return next((move for move in self._asked if pieces[move.node] < NODE_PIECES_MAX), None)

    def look_after(self) -> None:
        """Report what has ended, and what was heard. A thread of its own."""
        notices = self._client.notices
        while True:
            with self._changed:
                if not self._pieces and not self._expected and not self._pings and self._lingers.has_passed():
                    self._changed.wait(LOOK_S)
                self._end_where_hung()
                pieces = list(self._pieces)
                pings, self._pings = self._pings, []
            ended = [(piece, code) for piece in pieces if (code := self._client.look(piece[0]))]
            heard = notices.heard() if notices is not None else []
            with self._changed:
                for piece, _ in ended:
                    self._pieces.remove(piece)
                numbers = [self._take_mark(mark) for mark in heard]
                if notices is not None and (self._pieces or self._expected or ended or heard):
                    self._lingers = Deadline(LINGER_S)
                if ended or heard:
                    self._quiet = Deadline(QUIET_S)
                if not ended and not heard and not (notices is None and not pieces):
                    nap_s = NAP_S if pieces else EXPECTING_NAP_S
                    self._changed.wait(QUIET_NAP_S if self._quiet.has_passed() else nap_s)
                elif ended:
                    self._changed.notify_all()
            for (_, move), code in ended:
                self._end_piece(move, min(code, 0))
            for number in filter(None, numbers):
                self._link.answer(number, [0])
            for number in pings:
                self._link.answer(number, [0])

    def _take_mark(self, mark: bytes) -> int:
        """The request that expects a mark; 0 where there is none yet. REQUIRES: `_changed` is held."""
        number = self._expected.pop(mark, 0)
        if not number:
            self._early[mark] = None
            if len(self._early) > EARLY_MAX:
                self._early.popitem(last=False)
        return number

    def _end_where_hung(self) -> None:
        if self._submitted is not None and self._submitted[1].has_passed():
            self._link.answer(self._submitted[0].number, [HUNG])
            os._exit(1)

    def _end_piece(self, move: _Move, code: int) -> None:
        with self._changed:
            move.code = move.code or code
            move.left -= 1
            is_over = not move.left
        if not is_over:
            return
        notices = self._client.notices
        if notices is not None and not move.code and not notices.notify(move.other, move.mark):
            move.code = -1
        self._link.answer(move.number, [move.code, self._client.met])


def connect(settings: Mapping[str, Any], memory: mmap.mmap) -> MoveClient:
    """The library that the settings name. Raises ConnectionError, ImportError or OSError with the reason."""
    return connect_nixl(settings, memory) if settings["library"] == "nixl" else connect_engine(settings, memory)


def run(link: DaemonLink, client: MoveClient) -> None:
    """Move what the daemon asks for."""
    moves = _Moves(link, client)
    for work in (moves.submit_all, moves.look_after):
        threading.Thread(target=work, daemon=True).start()
    for number, *request in link.requests():
        moves.take_request(number, *request)


if __name__ == "__main__":
    serve(sys.argv[1:], connect, run)
