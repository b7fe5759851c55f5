"""Loop socket: a ZMQ socket on an event loop, read a few messages at a time.

ZMQ signals on a descriptor that something has happened, once: after each signal, and after each message sent, everything that
waits has to be read. A turn reads at most MESSAGES_PER_TURN, the next one comes after the loop's other work; where the socket
has a share of the loop's time, none is read beyond it.

On the loop and not on a thread of its own: what peers ask for is answered on the control thread, and each hop there costs more
than ZMQ itself (docs/peer-protocol.md has the figures). Loop thread only.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from kvpool.peers.loop_share import LoopShare

MESSAGES_PER_TURN = 32
# Parts of a message that are passed on, where it has one route and one body: a third one makes it invalid, however many follow.
PARTS_MAX = 3

# As plain numbers: these are read several times for each message, and enums would double the time.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class LoopSocket:
    """Owns a ZMQ socket. `on_message` gets the parts of each message, of too many the first ones and the last."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[list[zmq.Frame]], object],
        may_read: Callable[[], float] = lambda: 0.0,
        *,
        parts_max: int = PARTS_MAX,
        share: LoopShare | None = None,
    ) -> None:
        """`may_read`: asked before each message: 0, or the seconds for which nothing more is read. `share`: of the loop's time
        for these messages; None where only this process sends them."""
        self._share = share
        self._socket = socket
        self._loop = loop
        self._on_message = on_message
        self._may_read = may_read
        self._parts_max = parts_max
        self._next: asyncio.Handle | None = None
        self._fd: int = socket.FD
        self._is_closed = False
        loop.add_reader(self._fd, self._turn)
        self._go_on()

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message. Raises zmq.Again where there is no room, ZMQError where nobody is there."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        finally:
            self._go_on()

    def take_all(self) -> None:
        """Read what waits now, at once. REQUIRES: only this process sends, a bounded number."""
        while not self._is_closed and int(self._socket.get(_EVENTS)) & _POLLIN:
            self._take_message()
        self._go_on()

    def disable_monitor(self) -> None:
        """End the monitor of this socket, before who reads it is closed: ZMQ would wait for a reader for ever, with all
        connections of its context. REQUIRES: fewer events wait than a monitor holds."""
        if not self._is_closed:
            self._socket.disable_monitor()

    def release(self) -> "zmq.Socket[bytes]":
        """The socket, which is not read here any more, and the caller's to close."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            if self._next is not None:
                self._next.cancel()
        return self._socket

    def close(self) -> None:
        """Close the socket at once; nothing is delivered afterwards."""
        self.release().close(linger=0)

    def _go_on(self, wait_s: float = 0.0) -> None:
        if self._next is None:
            self._next = self._loop.call_later(wait_s, self._resume) if wait_s else self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._next = None
        if not self._is_closed:
            self._loop.add_reader(self._fd, self._turn)
            self._turn()

    def _turn(self) -> None:
        if self._next is not None:
            # The turn that is due comes in time; a signal that nobody has read would wake the loop again and again.
            self._loop.remove_reader(self._fd)
            return
        for _ in range(MESSAGES_PER_TURN):
            if self._is_closed or not int(self._socket.get(_EVENTS)) & _POLLIN:
                return
            wait_s = (self._share.wait_s if self._share is not None else 0.0) or self._may_read()
            if wait_s:
                self._loop.remove_reader(self._fd)
                self._go_on(wait_s)
                return
            try:
                self._take_message()
            except BaseException:
                self._go_on()
                raise
        if not self._is_closed:
            self._go_on()

    def _take_message(self) -> None:
        if self._share is None:
            self._on_message(self._receive())
            return
        with self._share.used():
            self._on_message(self._receive())

    def _receive(self) -> list[zmq.Frame]:
        parts = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while parts[-1].more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(parts) == self._parts_max:
                parts[-1] = part
            else:
                parts.append(part)
        return parts
