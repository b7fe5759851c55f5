"""One engine's or operator's connection after its handshake.

Reads frames, dispatches each to the pool, writes the answers in order; a handler that answers None says nothing. How long
each took, from its dispatch to its answer, goes into RequestTimes. A request that has to wait (for memory that is
being faulted in, for a deep check) is answered later; the connection reads and serves nothing more until then, nor while
the peer does not read its answers: there is never more than one request under way, and such a peer only stops itself. One
that sends many requests at once has REQUESTS_PER_TURN of them served before everybody else has a turn.

Control thread only. Life of a connection:

    OPEN ──EOF──► CLOSED
      └──bad frame──► DRAINING ──EOF──► CLOSED

In DRAINING nothing is read as a request any more, but the socket stays until the peer has closed it: only then is it
certain that nobody writes into slots that the peer had reserved.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from kvpool import failpoint
from kvpool.clock import Clock
from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import messages as m
from kvpool.protocol.frames import FrameReader
from kvpool.server.request_times import RequestTimes
from kvpool.types import ConnectionId

log = logging.getLogger(__name__)

Answer = object
Handler = Callable[[Any], Answer | Awaitable[Answer]]
# Payload bytes. The smallest answer has 7, and the event loop keeps up to 800 for each that waits (measured): 7 MiB in all.
WRITE_BUFFER_BYTES_MAX = 64 << 10
# What a flood of the dearest small requests may take of the loop in one go: about a millisecond (measured: 10-40 µs each).
REQUESTS_PER_TURN = 32


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection. `handlers` maps a request's kind to its record and its handler."""

    def __init__(
        self,
        connection_id: ConnectionId,
        handlers: dict[int, tuple[type[Any], Handler]],
        *,
        clock: Clock,
        times: RequestTimes,
        on_closed: Callable[[ConnectionId], None],
        on_protocol_error: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.id = connection_id
        self._handlers = handlers
        self._clock = clock
        self._times = times
        self._on_closed = on_closed
        self._on_protocol_error = on_protocol_error
        self._on_failed = on_failed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._turn: asyncio.Handle | None = None
        self._is_reading = True
        self._is_peer_reading = True
        self._is_draining = False

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "open" if self._transport else "closed"
        return f"<Connection {self.id} {state}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop gives the transport."""
        # uvloop's transports have the interface without being subclasses of it.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._is_draining:
            return
        self._reader.add(data)
        self._serve()

    def eof_received(self) -> bool:
        """The peer writes no more; nothing can be answered usefully either."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended: everything it held goes."""
        del error
        self._transport = None
        for under_way in (self._waiting, self._turn):
            if under_way is not None:
                under_way.cancel()
        self._on_closed(self.id)

    def pause_writing(self) -> None:
        """The peer does not read its answers: serve no more of its requests."""
        self._is_peer_reading = False
        self._read(is_wanted=self._is_draining)

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._is_peer_reading = True
        if self._waiting is None and self._turn is None:
            self._serve()

    def close(self) -> None:
        """End the connection after what has been written is sent."""
        if self._transport is not None:
            self._transport.close()

    def _serve(self) -> None:
        """Serve what has arrived; read on once nothing of it is left."""
        self._turn = None
        for _ in range(REQUESTS_PER_TURN):
            if self._waiting is not None or not self._is_peer_reading:
                return self._read(is_wanted=False)
            if self._transport is None or self._is_draining or not self._serve_next():
                return self._read(is_wanted=True)
        self._turn = asyncio.get_running_loop().call_soon(self._serve)
        return self._read(is_wanted=False)

    def _serve_next(self) -> bool:
        """Serve the next request. False where none has arrived whole, or what has arrived is none."""
        kind = 0
        started_ns = self._clock.now_ns()
        try:
            frame = self._reader.next()
            if frame is None:
                return False
            kind, sequence, values = frame
            record, handler = self._handler_of(kind)
            failpoint.reach("daemon.request.before", failpoint.refused)
            answer = handler(m.decode_as(record, values))
        except ProtocolError as error:
            self._drain(error)
            return False
        except KVPoolError as error:
            answer = self._refusal_of(error, kind)
        except Exception as error:
            answer = self._failure_of(error, kind)
        if isinstance(answer, Awaitable):
            # The task is the answer itself: one around it, ended before its first step, would leave it never awaited.
            self._waiting = asyncio.ensure_future(answer)
            self._waiting.add_done_callback(partial(self._answer_late, kind, sequence, started_ns))
        else:
            self._times.add(kind, self._clock.now_ns() - started_ns)
            self._send(answer, sequence)
        return True

    def _handler_of(self, kind: int) -> tuple[type[Any], Handler]:
        entry = self._handlers.get(kind)
        if entry is None:
            raise ProtocolError(f"frame of kind {kind} has no place on this connection")
        return entry

    def _refusal_of(self, error: KVPoolError, kind: int) -> m.Failure:
        self._times.add_refusal(kind)
        return m.Failure("refused", str(error))

    def _failure_of(self, error: BaseException, kind: int) -> m.Failure:
        self._times.add_failure(kind)
        log.error("request of kind %d on connection %d failed", kind, self.id, exc_info=error)
        if isinstance(error, MemoryError):
            self._on_failed(error)  # it may have struck between two steps that belong together
        return m.Failure("internal", f"{type(error).__name__}: {error}")

    def _answer_late(self, kind: int, sequence: int, started_ns: int, answered: "asyncio.Future[Answer]") -> None:
        self._waiting = None
        if answered.cancelled():
            return
        error = answered.exception()
        self._times.add(kind, self._clock.now_ns() - started_ns)
        if error is None:
            self._send(answered.result(), sequence)
        elif isinstance(error, KVPoolError):
            self._send(self._refusal_of(error, kind), sequence)
        else:
            self._send(self._failure_of(error, kind), sequence)
        self._serve()

    def _read(self, *, is_wanted: bool) -> None:
        if is_wanted == self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = is_wanted
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _send(self, answer: Answer, sequence: int) -> None:
        if self._transport is None or answer is None:
            return
        try:
            failpoint.reach("daemon.answer.before_send")
        except OSError as error:
            log.warning("connection %d ends: %s", self.id, error)
            self._transport.abort()
            return
        self._transport.write(m.encode(answer, sequence))

    def _drain(self, error: ProtocolError) -> None:
        self._on_protocol_error()
        log.warning("connection %d is refused: %s", self.id, error)
        self._is_draining = True
        self._reader = FrameReader()
        self._send(m.Failure("protocol", str(error)), 0)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
