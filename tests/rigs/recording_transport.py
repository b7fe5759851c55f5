"""A connection of the daemon's over a transport that records what is written."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from kvpool.clock import Clock
from kvpool.ids import ConnectionId
from kvpool.protocol.frames import FrameReader
from kvpool.protocol.records import messages as m
from kvpool.server.connections.connection import Connection
from kvpool.server.connections.turns import Turns
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.service import VERBS


class Transport(asyncio.Transport):
    """Takes what is written; knows whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reads = True
        self.has_ended = False
        self.was_aborted = False
        self.socket: socket.socket | None = None

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Its socket, where the test has given it one."""
        return self.socket if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        """Nothing is ever buffered."""
        return 0

    def abort(self) -> None:
        """Ends at once."""
        self.was_aborted = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The peer gets it."""
        self.written += data

    def is_closing(self) -> bool:
        """Never by itself."""
        return False

    def pause_reading(self) -> None:
        """Read no more."""
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        """Read on."""
        assert not self.reads
        self.reads = True

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def write_eof(self) -> None:
        """The last of it."""
        self.has_ended = True

    @property
    def answers(self) -> list[tuple[int, int, list[object]]]:
        """The written bytes, as frames."""
        return list(FrameReader().feed(bytes(self.written)))


def connection_over(
    handler: Callable[[Any], Any],
    clock: Clock,
    *,
    failures: list[BaseException] | None = None,
    turns: Turns | None = None,
    times: RequestTimes | None = None,
    on_closed: Callable[[ConnectionId, bool], None] = lambda *_: None,
) -> tuple[Connection, Transport]:
    """A connection that a handler serves, of tickets and of usage, and its transport."""
    connection = Connection(
        ConnectionId(1),
        {m.IssueTicket.KIND: (m.IssueTicket, handler), m.Usage.KIND: (m.Usage, handler)},
        clock=clock,
        turns=turns or Turns(clock),
        times=times or RequestTimes(VERBS),
        on_closed=on_closed,
        on_protocol_error=lambda: None,
        on_failed=(failures if failures is not None else []).append,
    )
    transport = Transport()
    connection.connection_made(transport)
    return connection, transport
