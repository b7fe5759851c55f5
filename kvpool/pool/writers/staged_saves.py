"""Staged saves (saves by copy): staging memory of connections, and copies from it into the slots they have reserved.

Joins the reservations with the transfer threads; the pool owns it. What the daemon publishes has the checksums of the bytes
it has stored. Control thread only; copies come back through the event loop.

Invariant: for every copy under way its reservation counts one, so no slot is reused while it is written.
"""

import asyncio
from collections.abc import Callable

import kvpool_native
from kvpool.clock import Clock
from kvpool.errors import LayoutMismatch, ProtocolError, Refused
from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Extents
from kvpool.layout import Layout
from kvpool.packed_numbers import pack_u64
from kvpool.pool.writers.writers import Writers
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.transfer.staged_copy import StagedCopy
from kvpool.transfer.staging import StagingAreas
from kvpool.transfer.workers import Workers, call_later
from kvpool.units import write_size


class StagedSaves:
    """The saves of all connections that go through staging; none do where `staging_bytes` is 0."""

    def __init__(
        self, writers: Writers, arena: kvpool_native.Mapping, workers: Workers, clock: Clock, *, staging_bytes: int
    ) -> None:
        self._writers = writers
        self._arena = arena
        self._workers = workers
        self._clock = clock
        self._areas = StagingAreas(staging_bytes)

    def __repr__(self) -> str:
        return f"<StagedSaves {self._areas!r}>"

    @property
    def staging_bytes(self) -> int:
        """The size of one connection's staging memory."""
        return self._areas.size_bytes

    def check_layout(self, layout: Layout) -> None:
        """Raises LayoutMismatch where not even one extent of a chunk fits staging."""
        if self.staging_bytes and layout.extent_bytes > self.staging_bytes:
            raise LayoutMismatch(
                f"an extent of a chunk of this layout has {write_size(layout.extent_bytes)}, "
                f"server.staging is {write_size(self.staging_bytes)}: no chunk can be saved"
            )

    def open(self, session: EngineSession) -> tuple[mm.Memory, int]:
        """The connection's staging memory: the answer, and its descriptor. Raises Refused."""
        if not self.staging_bytes:
            raise Refused("mode", "server.write_mode is in-place: reserved slots are written in place")
        try:
            area = self._areas.open(session.connection)
        except OSError as error:
            raise Refused("full", f"there is no staging memory: {error}") from error
        return mm.Memory(b"", area.size), area.fd

    @verb(sm.CopyStaged, roles=ENGINE)
    def copy(self, session: EngineSession, request: sm.CopyStaged) -> "m.Done | asyncio.Future[m.Done]":
        """Copy extents out of staging into reserved slots. Raises ProtocolError for what lies outside, Refused."""
        area = self._areas.find(session.connection)
        if area is None:
            raise Refused("staging", "this connection has no staging memory: ask for it first")
        layout = self._writers.layout_of(session, request.reservation, request.run)
        if layout is None:
            return m.Done()
        if not 0 < request.chunks <= m.KEYS_MAX or not 0 < request.extents <= layout.extents:
            raise ProtocolError(f"copy of {request.chunks} chunks and {request.extents} extents")
        if request.chunks * request.extents > sm.COPIED_EXTENTS_MAX:
            raise ProtocolError(
                f"copy of {request.chunks} chunks with {request.extents} extents each, at most {sm.COPIED_EXTENTS_MAX} in all"
            )
        chunks = range(request.first_chunk, request.first_chunk + request.chunks)
        numbers = range(request.first_extent, request.first_extent + request.extents)
        if not 0 <= request.offset <= area.size - len(chunks) * len(numbers) * layout.extent_bytes:
            raise ProtocolError(
                f"copy of {len(chunks)} chunks from offset {request.offset} of {area.size} bytes of staging"
            )
        extents, now_ns = Extents(chunks, numbers), self._clock.now_ns()
        begun = self._writers.begin_copy(session, request.reservation, request.run, extents, now_ns=now_ns)
        if begun is None:
            return m.Done()
        reservation, run, slots = begun
        first = numbers.start * layout.extent_bytes
        at_once, targets = len(numbers), pack_u64([slot + first for slot in slots])
        if run.is_part:
            # Its extents lie apart in the slots, and in staging one behind the other.
            at_once, targets = 1, self._writers.part_targets(run, slots, numbers, layout.extent_bytes)

        def end_copy(checksums: bytes, now_ns: int) -> None:
            self._writers.end_copy(reservation, run, extents, checksums, now_ns=now_ns)

        job = StagedCopy(self._arena, targets, area, request.offset, at_once, layout.extent_bytes)
        return self._start(job, end_copy)

    def drop_owner(self, connection: ConnectionId) -> None:
        """A connection has ended: release its staging memory."""
        self._areas.drop(connection)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return self._areas.stats()

    def _start(self, job: StagedCopy, end_copy: Callable[[bytes, int], None]) -> "asyncio.Future[m.Done]":
        """Run a copy on a transfer thread; the answer comes after `end_copy` has had its checksums, or none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[m.Done] = loop.create_future()

        def finish(result: object) -> None:
            end_copy(result if isinstance(result, bytes) else b"", self._clock.now_ns())
            if answer.done():
                return  # its connection has ended
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(m.Done())

        if not self._workers.submit(job, lambda result: call_later(loop, finish, result)):
            end_copy(b"", self._clock.now_ns())
            raise Refused("busy", "too many jobs are waiting for the transfer threads: try again later")
        return answer
