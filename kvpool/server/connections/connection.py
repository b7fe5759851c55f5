"""Connection of one engine or operator after its handshake.

Reads frames, dispatches each to the pool, writes the answers in order, none to the records of `one_way`. How long each took,
from its dispatch to its answer, goes into RequestTimes. A request that has to wait (for memory that is
being faulted in, for a deep check) is answered later; the connection reads and serves nothing else until then, nor while the
peer does not read its answers: there is never more than one request under way, and such a peer only blocks itself. A peer that
sends many requests at once is served in turns with the others (see `turns`), and so is a request in parts (see `index.parts`).

Control thread only. Life of a connection:

    OPEN ──EOF──► CLOSED
      └──bad frame──► DRAINING ──EOF──► CLOSED

In DRAINING input is no longer read as requests, but the socket stays until the peer has closed it: only then is it certain that
the peer writes no slots that it had reserved. Where this side closes first, at the daemon's end, it may still write.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import CoroutineType, GeneratorType
from typing import Any, cast

from kvpool import failpoint
from kvpool.clock import Clock
from kvpool.errors import KVPoolError, ProtocolError, Refused
from kvpool.ids import ConnectionId
from kvpool.index.parts import Parts
from kvpool.protocol import versions
from kvpool.protocol.frames import FrameReader
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.one_way import UNANSWERED
from kvpool.server.connections.lease_frames import ServeAtOnce
from kvpool.server.connections.turns import Turns
from kvpool.server.metrics.request_times import RequestTimes

log = logging.getLogger(__name__)

Answer = object
Handler = Callable[[Any], Answer | Awaitable[Answer] | Parts[Answer]]
Handlers = dict[int, tuple[type[Any], Handler]]
_AWAITED = (CoroutineType, asyncio.Future)
_CLOSED_BY_PEER = (ConnectionResetError, BrokenPipeError)
# Payload bytes. The smallest answer has 7, and the event loop keeps up to 800 for each that waits (measured): 7 MiB in all.
WRITE_BUFFER_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class AnswerWithDescriptor:
    """An answer with a file descriptor. The maker of the answer still owns and closes its own."""

    record: object
    fd: int


@dataclass(slots=True)
class _Request:
    """A request that is answered later: its `parts` still to be served, where it has any."""

    kind: int
    sequence: int
    started_ns: int
    parts: Parts[Answer] | None


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection. `handlers` maps a request's kind to its record and its handler."""

    def __init__(
        self,
        connection_id: ConnectionId,
        handlers: Handlers,
        *,
        clock: Clock,
        turns: Turns,
        times: RequestTimes,
        on_closed: Callable[[ConnectionId, bool], None],
        on_protocol_error: Callable[[], None],
        on_failed: Callable[[BaseException], None],
        on_unfinished: Callable[[ConnectionId, int], None] = lambda _connection, _unfinished: None,
        version: int = versions.NEWEST,
        serve_at_once: ServeAtOnce | None = None,
    ) -> None:
        """`on_closed`: called with whether the peer may still write slots. `on_unfinished`: called with how many bytes of an
        incomplete request have arrived. `version`: of the protocol, as the handshake has chosen it. `serve_at_once`: serves
        leading frames of what arrived, or none."""
        self.id = connection_id
        self._handlers = handlers
        self._clock = clock
        self._turns = turns
        self._times = times
        self._on_closed = on_closed
        self._on_protocol_error = on_protocol_error
        self._on_failed = on_failed
        self._on_unfinished = on_unfinished
        self._unfinished = 0  # the last reported value
        self._version = version
        self._serve_at_once = serve_at_once if version >= versions.NEWEST and not failpoint.is_armed() else None
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._request: _Request | None = None
        self._kind = 0  # of the request that was begun last
        self.used_ns = 0
        self.is_waiting = False
        self._is_reading = True
        self._is_peer_reading = True
        self._is_draining = False
        self._may_write = True  # the peer, slots that it has reserved

    def __repr__(self) -> str:
        return f"<Connection {self.id} {self.state}>"

    @property
    def state(self) -> str:
        """`open`, `ending` (see DRAINING above) or `closed`."""
        return "closed" if self._transport is None else "ending" if self._is_draining else "open"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop gives the transport."""
        # uvloop's transports have the interface without being subclasses of it.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._is_draining:
            return
        self._reader.add_bytes(data)
        if self._is_idle:
            if not self._unfinished and self._serve_while_idle():
                return
            if self._reader.is_short:  # a long request comes in several reads
                self._note_unfinished()
                return
        self._turns.ask_turn(self)
        if self.is_waiting:
            self._read(is_wanted=False)  # until it has had its turn: at most one read waits

    def eof_received(self) -> bool:
        """The peer has closed its side; answers are of no use now."""
        self._may_write = False
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended: release everything it held."""
        if isinstance(error, _CLOSED_BY_PEER):
            self._may_write = False
        self._transport = None
        self._give_request_up()
        self._on_closed(self.id, self._may_write)

    def pause_writing(self) -> None:
        """The peer does not read its answers: serve no more of its requests."""
        self._is_peer_reading = False
        self._read(is_wanted=self._is_draining)

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._is_peer_reading = True
        if self._waiting is None:
            self._turns.ask_turn(self)

    def close(self) -> None:
        """End the connection after what has been written is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, whether or not its peer reads."""
        if self._transport is not None:
            self._transport.abort()

    def end_service(self, reason: str, *, is_writer: bool) -> None:
        """Serve nothing else and send the reason. A writer's socket stays open until the peer closes it: only then it is
        certain not to write."""
        if self._transport is None or self._is_draining:
            return
        self._give_request_up()
        self._drain_with(m.Failure("disconnected", reason))
        if not is_writer:
            self._may_write = False
            self.abort()

    def fail(self, error: Exception) -> None:
        """Handle an error outside of a request's handler, for example an answer that cannot be encoded.

        Ends as after a bad frame: the peer may still write into slots.
        """
        try:
            failure = self._failure_of(error, self._kind)
            self._give_request_up()
            self._drain_with(failure)
        except Exception as further:
            log.error("connection %d ends unanswered", self.id, exc_info=further)
            self._begin_draining()

    def serve(self, until_ns: int) -> bool:
        """Serve what has arrived, until the given time; read on once all is served. Whether there may be more."""
        reader, now_ns = self._reader, self._clock.now_ns()
        while self._waiting is None and self._is_peer_reading:
            request = self._request
            if self._transport is None or self._is_draining:
                may_go_on = False
            elif request is not None:
                may_go_on = self._advance(request)
            else:
                may_go_on = reader.waiting > 0 and (
                    self._serve_leading(max(0, until_ns - now_ns)) or self._serve_next(now_ns)
                )
            if not may_go_on:
                if not self._is_reading:
                    self._read(is_wanted=True)
                if self._reader.waiting != self._unfinished:
                    self._note_unfinished()
                return False
            now_ns = self._clock.now_ns()
            if now_ns >= until_ns:
                self._read(is_wanted=False)
                return True
        self._read(is_wanted=False)
        return False

    @property
    def _is_idle(self) -> bool:
        """Whether nothing but what arrives is to be served."""
        is_under_way = self.is_waiting or self._request is not None or self._waiting is not None
        return not is_under_way and self._is_peer_reading

    def _serve_while_idle(self) -> bool:
        """Serve what has just arrived without a turn of its own, while nobody waits for one. Whether that was all."""
        if self._serve_at_once is None:
            return False
        try:
            self._turns.serve_at_once(self._serve_leading)
        except Exception as error:
            self.fail(error)
        return not self._reader.waiting

    def _serve_leading(self, left_ns: int) -> bool:
        """Serve whole requests that can be answered in one step, one at least, for so long. Whether there were any."""
        if self._serve_at_once is None:
            return False
        self._kind = 0  # of whatever fails in it
        served = self._serve_at_once(*self._reader.unread(), left_ns)
        if served is None:
            return False
        consumed, answers = served
        self._reader.skip(consumed)
        if answers and self._transport is not None:
            self._transport.write(answers)
        return True

    def _serve_next(self, started_ns: int) -> bool:
        """Serve the next request, or its first part. False where none is complete, or the frame is invalid."""
        kind, sequence = 0, 0
        try:
            frame = self._reader.next()
            if frame is None:
                return False
            kind, sequence, values = frame
            self._kind = kind
            record, handler = self._handlers.get(kind) or _refuse_kind(kind)
            failpoint.reach("daemon.request.before", failpoint.refused)
            if self._version >= versions.NEWEST:
                answer = handler(m.decode_as(record, values))
            else:
                answer = handler(versions.decode_of_any(record, values))
        except ProtocolError as error:
            self._drain(error)
            return False
        except Exception as error:
            answer = self._failure_to(kind, error)
        if type(answer) is GeneratorType:
            return self._advance(_Request(kind, sequence, started_ns, answer))
        if isinstance(answer, _AWAITED):
            self._await(answer, partial(self._answer_late, _Request(kind, sequence, started_ns, None)))
        else:
            self._answer(kind, sequence, started_ns, answer)
        return True

    def _give_request_up(self) -> None:
        """End the request under way, whether it waits or has parts left, without an answer."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._request is not None and self._request.parts is not None:
            self._request.parts.close()
        self._request = None

    def _advance(self, request: _Request) -> bool:
        """Serve the next part of a request. False where it broke the protocol."""
        assert request.parts is not None
        self._request = request
        try:
            awaited = next(request.parts)
        except StopIteration as end:
            answer = end.value
        except ProtocolError as error:
            self._request = None
            self._drain(error)
            return False
        except Exception as error:
            answer = self._failure_to(request.kind, error)
        else:
            if awaited is not None:
                self._await(awaited, self._go_on)
            return True
        self._request = None
        self._answer(request.kind, request.sequence, request.started_ns, answer)
        return True

    def _note_unfinished(self) -> None:
        """Report how many bytes of an incomplete request have arrived, where that has changed."""
        unfinished = self._reader.waiting
        if unfinished != self._unfinished:
            self._unfinished = unfinished
            self._on_unfinished(self.id, unfinished)

    def _await(self, awaited: Awaitable[Any], on_done: "Callable[[asyncio.Future[Any]], None]") -> None:
        # The task is the answer itself: one around it, ended before its first step, would leave it never awaited.
        self._waiting = asyncio.ensure_future(awaited)
        self._waiting.add_done_callback(on_done)

    def _failure_to(self, kind: int, error: Exception) -> m.Failure:
        if isinstance(error, KVPoolError):
            self._times.add_refusal(kind)
            if isinstance(error, Refused):
                return m.Failure(error.code, error.message)
            return m.Failure("refused", str(error))
        return self._failure_of(error, kind)

    def _failure_of(self, error: BaseException, kind: int) -> m.Failure:
        self._times.add_failure(kind)
        log.error("request of kind %d on connection %d failed", kind, self.id, exc_info=error)
        if isinstance(error, MemoryError):
            self._on_failed(error)  # it may have struck between two steps that belong together
        return m.Failure("internal", f"{type(error).__name__}: {error}")

    def _answer(self, kind: int, sequence: int, started_ns: int, answer: Answer) -> None:
        self._times.add_time(kind, self._clock.now_ns() - started_ns)
        if kind not in UNANSWERED:
            self._send(answer, sequence)

    def _answer_late(self, request: _Request, answered: "asyncio.Future[Answer]") -> None:
        self._waiting = None
        if answered.cancelled():
            return
        error = answered.exception()
        if error is None:
            answer = answered.result()
        elif isinstance(error, Exception):
            answer = self._failure_to(request.kind, error)
        else:
            answer = self._failure_of(error, request.kind)
        self._answer(request.kind, request.sequence, request.started_ns, answer)
        self._turns.ask_turn(self)

    def _go_on(self, awaited: "asyncio.Future[Any]") -> None:
        """Continue the request under way: what it waited for has come or failed, which it checks itself."""
        self._waiting = None
        if not awaited.cancelled():
            awaited.exception()
            self._turns.ask_turn(self)

    def _read(self, *, is_wanted: bool) -> None:
        if is_wanted == self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = is_wanted
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _send(self, answer: Answer, sequence: int) -> None:
        if self._transport is None or self._is_draining:
            return
        try:
            failpoint.reach("daemon.answer.before_send")
        except OSError as error:
            self._end_unanswered(error)
            return
        if isinstance(answer, AnswerWithDescriptor):
            self._pass_descriptor(self._transport, answer, sequence)
        else:
            self._transport.write(versions.encode_for(answer, sequence, self._version))

    def _pass_descriptor(self, transport: asyncio.Transport, answer: AnswerWithDescriptor, sequence: int) -> None:
        """Send past the transport, which cannot pass descriptors: only while its buffer is empty."""
        if transport.get_write_buffer_size():
            transport.write(m.encode(m.Failure("busy", "answers are waiting to be read: read them first"), sequence))
            return
        frame = m.encode(answer.record, sequence)
        try:
            with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sender:
                sent = socket.send_fds(sender, [frame], [answer.fd])
            if sent != len(frame):
                raise OSError(f"{sent} of {len(frame)} bytes of an answer with a descriptor were sent")
        except OSError as error:
            self._end_unanswered(error)

    def _end_unanswered(self, error: OSError) -> None:
        """End after an answer that cannot be sent, or was in part: without further bytes, and as after a bad frame, since the
        peer may still write into slots."""
        log.warning("connection %d ends: %s", self.id, error)
        self._begin_draining()

    def _drain(self, error: ProtocolError) -> None:
        self._on_protocol_error()
        log.warning("connection %d is refused: %s", self.id, error)
        self._drain_with(m.Failure("protocol", str(error)))

    def _drain_with(self, failure: m.Failure) -> None:
        self._send(failure, 0)
        self._begin_draining()

    def _begin_draining(self) -> None:
        """Nothing is sent any more, and what is read is no request."""
        if self._is_draining:
            return
        self._is_draining = True
        self._reader = FrameReader()
        self._note_unfinished()
        self._read(is_wanted=True)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()


def _refuse_kind(kind: int) -> tuple[type[Any], Handler]:
    raise ProtocolError(f"frame of kind {kind} is not allowed on this connection")
