"""Guard of an event socket: which routers may connect, how many, and how much each may send.

ZMQ accepts without a bound, and remembers each subscription, about 50 bytes for each of its own, until its connection has
ended. So the guard of the control plane between nodes (`peers/control`) watches these sockets too. Routers say no Hello: whose
connection outlives the time for a handshake was admitted. On TCP a subscriber may send UNREAD_BYTES_MAX in its life and a few
for heartbeats, and of a router that asks for replays so many can wait to be read. In the file system nothing counts what has
come; there so many can wait in the kernel, and BACKLOG_PER_LOOK_MAX requests be read while others wait behind them.

Loop thread only, but `note_requests` and `end_all`: any thread.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import zmq

from kvpool.clock import Clock
from kvpool.config.addresses import ZmqAddress
from kvpool.config.event_options import ROUTERS_MAX, STRANGERS_MAX
from kvpool.peers.control.accept_gate import AcceptGate
from kvpool.peers.control.connection_guard import ConnectionGuard
from kvpool.peers.control.guarded_connection import GuardSettings
from kvpool.peers.guarded_listener import accept_from, listen
from kvpool.peers.loop_share import LoopShare

HANDSHAKE_S = 5.0
UNREAD_BYTES_MAX = 64 << 10
# In a quarter of a second, with others waiting behind them: a router that waits for its answers has one or a few.
BACKLOG_PER_LOOK_MAX = 512
# Of a subscriber in a quarter of a second: what one sends in a millisecond takes ZMQ many.
SUBSCRIBES_PER_LOOK_MAX = 16
# Of the loop's time, for connections that come and go.
LOOP_SHARE = 0.2
# A router that has gone without a word ends after half a minute and three of these.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_S = 10
KEEPALIVES = 3

SETTINGS = GuardSettings(
    UNREAD_BYTES_MAX,
    connections_max=ROUTERS_MAX,
    strangers_max=STRANGERS_MAX,
    hello_s=HANDSHAKE_S + 1.0,
    backlog_per_look_max=BACKLOG_PER_LOOK_MAX,
    is_greeted=False,
)


class ListenerGuard:
    """See the module. Listens from the constructor on."""

    def __init__(
        self,
        made: "zmq.Socket[bytes]",
        option: str,
        address: ZmqAddress,
        *,
        bind_file: Callable[[str], None],
        on_flood: Callable[[], None],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`made`: not bound yet. `bind_file`: binds it at a path. `on_flood`: a connection that sends too much was ended.

        Raises OSError that names the option, and what `bind_file` raises; then nothing is bound."""
        made.setsockopt(zmq.RCVHWM, 0)  # bounded by the guard; `unread_bytes.py` says why
        made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVES)
        self._loop = loop
        self._listening: list[socket.socket] = []
        self._gate = AcceptGate(self._listening, clock)
        self._guard = ConnectionGuard(
            made,
            loop,
            clock,
            gate=self._gate,
            settings=_settings_of(made),
            on_end=lambda _: None,
            on_flood=on_flood,
            share=LoopShare(LOOP_SHARE, clock),
        )
        try:
            path = address.endpoint.removeprefix("ipc://")
            if path != address.endpoint:
                bind_file(path)
                self._guard.watch({path})
            else:
                self._listening.append(listen(option, address))
                accept_from(made, option, self._listening[0])
                self._guard.watch({self._listening[0].getsockname()[1]})
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<ListenerGuard {len(self._guard)} connections>"

    @property
    def ended(self) -> int:
        """Connections that were shut down until now."""
        return self._guard.ended

    @property
    def closures(self) -> int:
        """How often connections were kept away for a moment."""
        return self._gate.closures

    def note_requests(self, requests: Iterable[tuple[int, Sequence[int]]], *, is_backlog: bool) -> None:
        """Requests were read: of each the descriptor of its connection, and the sizes of its parts. `is_backlog`: others wait
        behind them."""
        read = [(descriptor, self._guard.wire_bytes(sizes)) for descriptor, sizes in requests]
        self._loop.call_soon_threadsafe(partial(self._guard.note_read, read, is_backlog=is_backlog))

    def end_all(self) -> None:
        """Shut every connection down: routers come again by themselves."""
        self._loop.call_soon_threadsafe(self._guard.end_all)

    def end_monitor(self) -> None:
        """The last call: any thread. REQUIRES: the socket is closed."""
        self._guard.end_monitor()

    def close(self) -> None:
        """Stop watching, and accept no more. The socket is its owner's to close."""
        self._guard.close()
        for listening in self._listening:
            listening.close()


def _settings_of(made: "zmq.Socket[bytes]") -> GuardSettings:
    settings = replace(SETTINGS, is_encrypted=bool(made.getsockopt(zmq.CURVE_SERVER)))
    if made.getsockopt(zmq.TYPE) == zmq.XPUB:
        # A subscriber sends no messages that are read: all that it ever sends is unread.
        return replace(settings, first_bytes_max=UNREAD_BYTES_MAX, arrivals_per_look_max=SUBSCRIBES_PER_LOOK_MAX)
    return settings
