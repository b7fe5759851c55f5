"""One engine's or operator's connection after its handshake.

Reads frames, dispatches each to the pool, writes the answers in order; a handler that answers None says nothing. How long
each took, from its dispatch to its answer, goes into RequestTimes. A request that has to wait (for memory that is
being faulted in, for a deep check) is answered later; the connection reads nothing more until then, so there is never
more than one request under way and a peer that does not read its answers only stops itself.

Control thread only. Life of a connection:

    OPEN ──EOF──► CLOSED
      └──bad frame──► DRAINING ──EOF──► CLOSED

In DRAINING nothing is read as a request any more, but the socket stays until the peer has closed it: only then is it
certain that nobody writes into slots that the peer had reserved.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kvpool.clock import Clock
from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import messages as m
from kvpool.protocol.frames import FrameReader
from kvpool.server.request_times import RequestTimes
from kvpool.types import ConnectionId

log = logging.getLogger(__name__)

Answer = object
Handler = Callable[[Any], Answer | Awaitable[Answer]]
WRITE_BUFFER_BYTES_MAX = 4 << 20


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
    ) -> None:
        self.id = connection_id
        self._handlers = handlers
        self._clock = clock
        self._times = times
        self._on_closed = on_closed
        self._on_protocol_error = on_protocol_error
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._pending: list[tuple[int, int, list[object]]] = []
        self._waiting: asyncio.Task[None] | None = None
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
        try:
            for frame in self._reader.feed(data):
                self._pending.append(frame)
        except ProtocolError as error:
            self._drain(error)
            return
        self._serve_pending()

    def eof_received(self) -> bool:
        """The peer writes no more; nothing can be answered usefully either."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended: everything it held goes."""
        del error
        self._transport = None
        if self._waiting is not None:
            self._waiting.cancel()
        self._on_closed(self.id)

    def pause_writing(self) -> None:
        """The peer does not read its answers: read no more of its requests."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        if self._transport is not None and self._waiting is None:
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection after what has been written is sent."""
        if self._transport is not None:
            self._transport.close()

    def _serve_pending(self) -> None:
        while self._pending and self._waiting is None and not self._is_draining:
            kind, sequence, values = self._pending.pop(0)
            started_ns = self._clock.now_ns()
            try:
                record, handler = self._handler_of(kind)
                answer = handler(m.decode_as(record, values))
            except ProtocolError as error:
                self._drain(error)
                return
            except KVPoolError as error:
                answer = self._refusal_of(error, kind)
            except Exception as error:
                answer = self._failure_of(error, kind)
            if isinstance(answer, Awaitable):
                self._wait_for(answer, kind, sequence, started_ns)
            else:
                self._times.add(kind, self._clock.now_ns() - started_ns)
                self._send(answer, sequence)

    def _handler_of(self, kind: int) -> tuple[type[Any], Handler]:
        entry = self._handlers.get(kind)
        if entry is None:
            raise ProtocolError(f"frame of kind {kind} has no place on this connection")
        return entry

    def _refusal_of(self, error: KVPoolError, kind: int) -> m.Failure:
        self._times.add_refusal(kind)
        return m.Failure("refused", str(error))

    def _failure_of(self, error: Exception, kind: int) -> m.Failure:
        self._times.add_failure(kind)
        log.error("request of kind %d on connection %d failed", kind, self.id, exc_info=error)
        return m.Failure("internal", f"{type(error).__name__}: {error}")

    def _wait_for(self, answer: Awaitable[Answer], kind: int, sequence: int, started_ns: int) -> None:
        if self._transport is not None:
            self._transport.pause_reading()
        self._waiting = asyncio.ensure_future(self._answer_later(answer, kind, sequence, started_ns))

    async def _answer_later(self, answer: Awaitable[Answer], kind: int, sequence: int, started_ns: int) -> None:
        result: Answer
        try:
            result = await answer
        except KVPoolError as error:
            result = self._refusal_of(error, kind)
        except Exception as error:
            result = self._failure_of(error, kind)
        self._waiting = None
        self._times.add(kind, self._clock.now_ns() - started_ns)
        self._send(result, sequence)
        if self._transport is not None:
            self._transport.resume_reading()
            self._serve_pending()

    def _send(self, answer: Answer, sequence: int) -> None:
        if self._transport is not None and answer is not None:
            self._transport.write(m.encode(answer, sequence))

    def _drain(self, error: ProtocolError) -> None:
        self._on_protocol_error()
        log.warning("connection %d is refused: %s", self.id, error)
        self._is_draining = True
        self._pending.clear()
        self._send(m.Failure("protocol", str(error)), 0)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
