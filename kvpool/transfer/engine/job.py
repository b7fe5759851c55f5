"""Job of the engine transport: the chunks of one offer, fetched part by part.

    asked ──Staged──► reading ──► read ──► copied into the slots, verified, announced
      └──the owner writes, Staged─────┘    in the order of the rows, whatever came first

Parts are consecutive rows, extent 0 of all chunks first. `PARTS_AHEAD` of them are under way, so that the owner copies one
while another is read and a third is verified. A part may come with fewer rows than it was asked for; then all behind them are
asked for again. Loop thread only, but for the copies.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

import kvpool_native
from kvpool.clock import Clock, Deadline
from kvpool.errors import KVPoolError, PeerNotAsked, Refused
from kvpool.ids import CHECKSUM_BYTES
from kvpool.peers.asking import Asking
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.engine.engine import BounceRange, Engine, Expected, Half, MoveEnd
from kvpool.transfer.stream_address import stream_of
from kvpool.transfer.transport import ChunkEnd, Ending, Order

PARTS_AHEAD = 3
# For the first row of a part: the owner answers after this in any case.
WAIT_S = 0.5
# A part may take as long beside the stall time as its bytes take at this rate.
LEAST_BYTES_PER_S = 50 << 20
# Faults of an owner's path, by the codes of its refusals.
REFUSED_FAULTS = {r.RefusalCode.TRANSPORT: "other_transport", r.RefusalCode.UNWRITTEN: "broken"}
# Refusals of a StageInto of which something may be written.
DOUBTFUL = (r.RefusalCode.UNWRITTEN, r.RefusalCode.FAILED)


class PartFailed(KVPoolError):
    """The rows of a part do not come. `fault`: a word for why; "full" and "away" are of this node."""

    def __init__(self, fault: str, text: str) -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that were read: `rows` of them from `first` on, out of `asked`."""

    number: int
    first: int
    asked: int
    rows: int
    taken: BounceRange | None
    checks: bytes
    gone: bytes


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all jobs share. `report`: takes the end of a chunk. `asked`: questions whose answers say whether a range that was
    given up is still written to."""

    engine: Engine
    asking: Asking
    arena: kvpool_native.Mapping
    landings: kvpool_native.LandingBoard
    threads: ThreadPoolExecutor
    clock: Clock
    report: Callable[[ChunkEnd], None]
    asked: "set[asyncio.Task[r.Staged]]" = field(default_factory=set)


class EngineJob:
    """See the module. Invariant: each chunk is reported once, when nothing writes to its slot any more."""

    def __init__(self, number: int, order: Order, around: Surroundings) -> None:
        self.number = number
        self.order = order
        self._around = around
        self._chunks = order.into.chunks
        self._rows = self._chunks * order.extents
        self._offsets = np.frombuffer(order.into.arena_offsets, "<u8")
        self._slots = np.frombuffer(order.into.arena_slots, "<u8")
        self._promised = _by_row(order.offer.checks, order.extents)
        self._part_rows = around.engine.part_bytes(order.extent_bytes) // order.extent_bytes
        self._faults: dict[int, tuple[Ending, str]] = {}  # chunks that have failed
        self._is_reported = bytearray(self._chunks)
        self._parts = 0
        self._over: list[int] = []  # parts that the owner may forget
        self._without_room: set[int] = set()  # first rows of parts that wait for this node's own buffer
        self.fault = ""  # why the path failed

    def __repr__(self) -> str:
        return f"<EngineJob {self.number}, {sum(self._is_reported)} of {self._chunks} chunks>"

    async def run(self) -> None:
        """Fetch everything. Ends by the order's deadline; every chunk is reported then."""
        deadline = Deadline(self.order.timeout_s, self._around.clock)
        window: deque[asyncio.Task[_Part]] = deque()
        ending, fault = Ending.FAILED, "late"
        try:
            await self._fetch_all(window, deadline)
        except PartFailed as failed:
            # It is chance whether the asking node or the waiter for the part notices the deadline first.
            is_late = failed.fault == "unreachable" and deadline.has_passed()
            fault = self.fault = "late" if is_late else failed.fault
        except asyncio.CancelledError:
            ending, fault = Ending.CANCELLED, "cancelled"
        finally:
            await _end_all(window, self._around.engine)
            for chunk in range(self._chunks):
                self._end_chunk(chunk, ending, fault)

    async def _fetch_all(self, window: "deque[asyncio.Task[_Part]]", deadline: Deadline) -> None:
        cursor, taken, loop = 0, 0, asyncio.get_running_loop()
        ahead = PARTS_AHEAD if self.order.offer.checks else 1
        while (cursor < self._rows or window) and len(self._faults) < self._chunks:
            while cursor < self._rows and len(window) < ahead:
                rows = min(self._part_rows, self._rows - cursor, r.STAGE_ROWS_MAX)
                window.append(loop.create_task(self._fetch(cursor, rows, deadline)))
                cursor += rows
            done, _ = await asyncio.wait({window[0]}, timeout=deadline.remaining_s())
            if not done:
                fault = self._fullness() if taken in self._without_room else "late"
                raise PartFailed(fault, "a part was not there by the deadline")
            part = window.popleft().result()
            await self._take(part)
            taken = part.first + part.rows
            if part.rows < part.asked:
                await _end_all(window, self._around.engine)
                window.clear()
                cursor = taken

    async def _fetch(self, first: int, rows: int, deadline: Deadline) -> _Part:
        """Have rows staged, and read them. Raises PartFailed."""
        engine, size = self._around.engine, self.order.extent_bytes
        self._without_room.add(first)
        try:
            taken = await self._room(rows * size, deadline)
        finally:
            self._without_room.remove(first)
        self._parts += 1
        number, over = self._parts, self._over[: r.STAGE_PARTS_MAX]
        del self._over[: len(over)]
        ended = np.array(over, "<u4").tobytes()
        wait_ms = int(min(WAIT_S, deadline.remaining_s()) * 1000)
        stage = r.Stage(self.order.offer.pull, number, ended, first, rows, engine.settings.way, wait_ms)
        count = 0
        try:
            if engine.writes:
                staged = await self._have_written(stage, taken, deadline)
            else:
                staged = await ask_stage(self._around.asking, self.order, stage, deadline)
                if staged.gone:
                    await self._read(staged, taken, deadline)
            count = len(staged.gone)
        finally:
            if not count:
                engine.give(taken)
                self._over.append(number)
        return _Part(number, first, rows, count, taken if count else None, staged.checks, staged.gone)

    async def _have_written(self, stage: r.Stage, into: BounceRange, deadline: Deadline) -> r.Staged:
        """Have rows written. Raises PartFailed; then the range is in quarantine as long as it may be written to."""
        around, order = self._around, self.order
        move_s = stage.rows * order.extent_bytes / LEAST_BYTES_PER_S
        timeout_s = min(stage.wait_ms / 1000 + order.stall_s + move_s, deadline.remaining_s())
        wanted = Wanted(order.link, order.node, stage, into)
        staged = await ask_to_write(around, wanted, timeout_s)
        around.engine.counts["read_bytes"] += len(staged.gone) * order.extent_bytes
        return staged

    async def _read(self, staged: r.Staged, into: BounceRange, deadline: Deadline) -> None:
        """Read what was staged. Raises PartFailed."""
        engine, size = self._around.engine, len(staged.gone) * self.order.extent_bytes
        check_server(self.order.node, self.order.link.member.endpoint, staged, engine)
        timeout_s = min(self.order.stall_s + size / LEAST_BYTES_PER_S, deadline.remaining_s())
        end = await engine.read(into, staged.server, staged.address, size=size, timeout_s=timeout_s)
        _check_end(end, f"{staged.server} cannot be read")
        engine.counts["read_bytes"] += size

    async def _room(self, size: int, deadline: Deadline) -> BounceRange:
        engine = self._around.engine
        while True:
            taken = engine.reserve_range(Half.READ, size, self.order.node)
            if taken is not None:
                return taken
            if not engine.is_serving or deadline.has_passed():
                raise PartFailed(self._fullness() if engine.is_serving else "away", "there is no room for a part")
            await engine.room(Half.READ, deadline.remaining_s())

    def _fullness(self) -> str:
        """Whose fault it is that there is no room: late reads of the node itself may have it."""
        return "late" if self._around.engine.has_late_reads(self.order.node) else "full"

    async def _take(self, part: _Part) -> None:
        """Copy a part's rows into the slots, and announce those that are right."""
        if part.taken is None:
            return
        copying = asyncio.get_running_loop().run_in_executor(self._around.threads, self._land, part)
        try:
            ended = await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait({copying})  # a slot is reported when nothing writes to it any more
            raise
        finally:
            self._around.engine.give(part.taken)
            self._over.append(part.number)
        for chunk, ending, fault in ended:
            self._end_chunk(chunk, ending, fault)

    def _land(self, part: _Part) -> list[tuple[int, Ending, str]]:
        """The chunks that have ended with these rows. On a thread."""
        assert part.taken is not None
        ended: list[tuple[int, Ending, str]] = []
        size, extents = self.order.extent_bytes, self.order.extents
        for number in range(part.rows):
            extent, chunk = divmod(part.first + number, self._chunks)
            if chunk in self._faults:
                continue
            fault = ""
            if part.gone[number]:
                fault = "gone"
            else:
                target = (int(self._offsets[chunk]) + extent * size).to_bytes(8, "little")
                source = part.taken.offset + number * size
                found = kvpool_native.copy_extents(self._around.arena, target, part.taken.memory, source, 1, size)
                if found != part.checks[
                    number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES
                ] or not self._is_promised(part.first + number, found):
                    fault = "checksum"
                else:
                    self._around.landings.land(int(self._slots[chunk]), extent, found)
            if fault:
                self._faults[chunk] = (Ending.WRONG, fault)
                ended.append((chunk, Ending.WRONG, fault))
            elif extent == extents - 1:
                ended.append((chunk, Ending.DONE, ""))
        return ended

    def _is_promised(self, row: int, found: bytes) -> bool:
        return self._promised is None or int(self._promised[row]) == int.from_bytes(found, "little")

    def _end_chunk(self, chunk: int, ending: Ending, fault: str) -> None:
        if self._is_reported[chunk]:
            return
        self._is_reported[chunk] = 1
        if ending is not Ending.DONE:
            self._around.landings.fail(int(self._slots[chunk]))
        self._around.report(ChunkEnd(self.number, chunk, ending, fault))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a node is to write into a range."""

    link: PeerLink
    node: str
    stage: r.Stage
    into: BounceRange


async def ask_to_write(around: Surroundings, wanted: Wanted, timeout_s: float) -> r.Staged:
    """The owner's answer, once the bytes are there. Raises PartFailed.

    Whoever gives up meanwhile leaves a question that was sent behind, until the quarantine of its range ends: its answer may be
    that the range is not written to."""
    engine, asked = around.engine, around.asked
    place = engine.agent, engine.address_of(wanted.into)  # of the life of the process that the range is from
    expected: list[Expected] = []  # once it is sent

    def send() -> r.StageInto:
        expected.append(engine.expect(wanted.into, timeout_s=timeout_s))
        return r.StageInto(*(*astuple(wanted.stage), *place, expected[0].mark))

    def settle(task: "asyncio.Task[r.Staged]") -> None:
        asked.discard(task)
        if expected and not task.cancelled() and _brings_nothing(task):
            engine.call_off(wanted.into, expected[0])

    question = asyncio.get_running_loop().create_task(
        _ask(around.asking, wanted.link, wanted.node, send, timeout_s=engine.expected_s)
    )
    asked.add(question)
    question.add_done_callback(settle)
    try:
        await asyncio.wait({question}, timeout=max(0.001, timeout_s))
    finally:
        if not expected:
            question.cancel()  # it has not left
    if not question.done():
        raise PartFailed("late", f"{wanted.node} did not answer in time")
    staged = question.result()
    if staged.gone or staged.address:
        _check_end(await expected[0].ended, f"{wanted.node} has not written")
    return staged


def _brings_nothing(answered: "asyncio.Task[r.Staged]") -> bool:
    """Whether nothing was written, and will not be: the owner says so, or was not asked."""
    error = answered.exception()
    if error is not None:
        reason = error.__cause__
        return isinstance(reason, PeerNotAsked) or (isinstance(reason, Refused) and reason.code not in DOUBTFUL)
    return not answered.result().gone and not answered.result().address


def _check_end(end: MoveEnd, what: str) -> None:
    """Raises PartFailed for a move that has not succeeded."""
    if end is not MoveEnd.DONE:
        raise PartFailed("late" if end is MoveEnd.LATE else "broken", f"{what}: {end.name}")


async def ask_stage(asking: Asking, order: Order, stage: r.Stage, deadline: Deadline) -> r.Staged:
    """The owner's answer. Raises PartFailed."""
    timeout_s = min(stage.wait_ms / 1000 + order.stall_s, deadline.remaining_s())
    return await _ask(asking, order.link, order.node, lambda: stage, timeout_s=timeout_s)


async def _ask(
    asking: Asking, link: PeerLink, node: str, stage: Callable[[], r.AnyStage], *, timeout_s: float
) -> r.Staged:
    try:
        staged: r.Staged = await asking.ask_node(link, node, stage, max(0.001, timeout_s))
    except Refused as refused:
        raise PartFailed(REFUSED_FAULTS.get(refused.code, "refused"), str(refused)) from refused
    except KVPoolError as error:
        raise PartFailed("unreachable", str(error)) from error
    return staged


def check_server(node: str, endpoint: str, staged: r.Staged, engine: Engine) -> None:
    """Raises PartFailed for a server that is not at the node's own endpoint, or that stands for a former life."""
    if stream_of(endpoint, f"tcp://{staged.server}") is None:
        raise PartFailed("foreign", f"{node} names TransferEngine at {staged.server}, expected its own host")
    if not engine.knows(staged.server, staged.life):
        raise PartFailed("stale", f"{staged.server} stood for a former life of {node}")


async def _end_all(window: "deque[asyncio.Task[_Part]]", engine: Engine) -> None:
    """End parts under way: their ranges are given back, or in quarantine."""
    for task in window:
        task.cancel()
    if window:
        await asyncio.wait(window)
    for task in window:
        if not task.cancelled() and task.exception() is None and (taken := task.result().taken) is not None:
            engine.give(taken)


def _by_row(checks: bytes, extents: int) -> "np.ndarray[Any, np.dtype[Any]] | None":
    """Promised checksums in the order of rows; None where there are none."""
    return np.frombuffer(checks, "<u4").reshape(-1, extents).T.ravel() if checks else None
