"""Served parts: extents of offered chunks, copied to where other nodes' TransferEngines read them, or NIXL writes them from.

    Stage ──room, rows have landed──► COPYING ──► SERVED ──ended, offer over──► its range is free
      │                                  └─StageInto─► WRITING ──nothing is written any more, answer──► free
      └──nothing in time──► no rows

A row is copied once, with its checksum in the same pass. It counts only where that is the chunk's, and the chunk is still in
its slot after the copy; else the chunk has gone. What is read is verified by who reads it: strangers can write there too.

Loop thread only; rows are copied by threads. Invariants: a range is given back once, after no thread writes it; parts of an
offer that is over are none.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvpool_native
from kvpool.clock import NS_PER_S, Clock, Deadline
from kvpool.ids import CHECKSUM_BYTES
from kvpool.peers.control import records as r
from kvpool.transfer.engine.engine import BounceRange, Engine, Half, MoveEnd, PullingNode
from kvpool.transfer.engine.job import PARTS_AHEAD

# Between two looks at extents that have not landed.
LOOK_S = 2e-3
# Of an offer whose chunks are still landing, in a part: each is looked at alone.
LANDING_ROWS_MAX = 256
LANDING = -1
# Parts of one offer at once.
PARTS_MAX = 16
# Of what makes a connection, whatever the bytes are.
GREETING_BYTES = 4096

Answer = Callable[[r.Staged | r.Refused], bool]


Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class OfferedChunks:
    """Chunks of an offer, with so many extents each. `columns`: arena offsets, slots and generations, u64."""

    columns: tuple[bytes, bytes, bytes]
    extents: int
    extent_bytes: int


# CRC-32C u32 [chunk][extent] of chunks whose first extents, so many, have all landed; else empty.
Checks = Callable[[OfferedChunks], bytes]


@dataclass(slots=True)
class _Offered:
    """An offer as it is served. `checks`: of its rows, once all have landed. `parts`: by number,
    `tasks` those that are about to be, `writing` those of them whose bytes move."""

    peer: str
    chunks: OfferedChunks
    offsets: list[int]
    slots: list[int]
    generations: list[int]
    checks: Column | None = None
    parts: dict[int, BounceRange] = field(default_factory=dict)
    tasks: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)

    def give_up(self, part: int) -> None:
        """End the task of a part, unless it is being written: who is answered before that has ended may use its memory for
        others."""
        if part not in self.writing:
            self.tasks[part].cancel()

    @property
    def rows(self) -> int:
        """Of all chunks."""
        return len(self.offsets) * self.chunks.extents


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that can be copied: the first one's number, and the checksum that each should have; None where its chunk has
    gone."""

    offered: _Offered
    first: int
    checks: Sequence[int | None]


class ServedParts:
    """See the module. `bytes_per_s`: that one node reads at most, 0 for no bound. `stall_s`: for which a puller waits beside
    what it allows for the bytes."""

    def __init__(
        self,
        engine: Engine,
        arena: kvpool_native.Mapping,
        index: kvpool_native.IndexView,
        checks: Checks,
        *,
        threads: int,
        bytes_per_s: int,
        stall_s: float,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._index = index
        self._checks = checks
        self._bytes_per_s = bytes_per_s
        self._pace_s = min(stall_s, r.INTO_BEGIN_S)  # a part is waited for, or a write begun, no longer
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, "kvpool-served")
        self._offers: dict[int, _Offered] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._free_ns: dict[str, int] = {}  # when each node may read more

    def __repr__(self) -> str:
        return f"<ServedParts of {len(self._offers)} offers>"

    @property
    def served_bytes(self) -> int:
        """Bytes that others could read."""
        return self._engine.counts["served_bytes"]

    def add_offer(self, offer: int, peer: str, chunks: OfferedChunks, checks: bytes) -> None:
        """An offer has begun. `checks`: CRC-32C [chunk][extent], or empty where not all have landed."""
        offsets, slots, generations = (np.frombuffer(one, "<u8").tolist() for one in chunks.columns)
        offered = self._offers[offer] = _Offered(peer, chunks, offsets, slots, generations)
        if checks:
            offered.checks = np.frombuffer(checks, "<u4").reshape(-1, chunks.extents).T.ravel()

    def drop(self, offer: int) -> None:
        """An offer is over: its chunks may leave their slots."""
        offered = self._offers.pop(offer)
        for part in offered.tasks:
            offered.give_up(part)
        for part in list(offered.parts):
            self._engine.give(offered.parts.pop(part))

    def serve(self, offer: int | None, stage: r.AnyStage, answer: Answer, *, puller: PullingNode) -> None:
        """Answer a Stage of a node, now or later. `offer`: of its pull, None where there is none."""
        offered = None if offer is None else self._offers.get(offer)
        lack = self._lack(offered, stage, puller)
        if lack:
            answer(r.Refused(r.RefusalCode.TRANSPORT, f"{self._engine.settings.title} of this node {lack}"))
        elif offered is None and isinstance(stage, r.StageInto) and not stage.rows:
            greeting = asyncio.get_running_loop().create_task(self._greet(stage, answer, puller))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)
        elif offered is None and not stage.rows:
            answer(self._staged(stage, self._engine.served_address))  # for a read that makes a connection
        elif offered is None or not self._can_be(offered, stage):
            answer(r.Refused(r.RefusalCode.PROTOCOL, "no part that there can be, or of no pull with chunks here"))
        else:
            for part in np.frombuffer(stage.ended, "<u4").tolist():
                if part in offered.parts:
                    self._engine.give(offered.parts.pop(part))
                elif part in offered.tasks:
                    offered.give_up(part)  # before it was served: nobody would end it again
            task = asyncio.get_running_loop().create_task(self._stage(offered, stage, answer, puller))
            offered.tasks[stage.part] = task
            task.add_done_callback(lambda task: self._end(offered, stage, task, answer))

    def close(self) -> None:
        """Wait for the copies. Any thread; no offer is left."""
        self._threads.shutdown()

    def _end(self, offered: _Offered, stage: r.AnyStage, task: "asyncio.Task[None]", answer: Answer) -> None:
        del offered.tasks[stage.part]
        offered.writing.discard(stage.part)
        if task.cancelled():
            answer(self._staged(stage))

    def _lack(self, offered: _Offered | None, stage: r.AnyStage, puller: PullingNode) -> str:
        """Why nothing can move as a Stage wants it; empty where it can."""
        engine, way = self._engine, self._engine.settings.way
        if not engine.is_serving or stage.protocol != way:
            return f"uses {way if engine.is_serving else 'none that runs'}, the puller's {stage.protocol}"
        if isinstance(stage, r.StageInto) != engine.writes and (stage.rows or not engine.writes):
            return "writes" if engine.writes else "is read from"
        if engine.writes and engine.blames(puller.peer):
            return f"does not write to {puller.name} for a while: its writes have kept it from others"
        part_bytes = engine.part_bytes(1 if offered is None else offered.chunks.extent_bytes)
        if 0 < self._bytes_per_s * self._pace_s < PARTS_AHEAD * part_bytes:  # its parts would come too late
            return f"is not used where {PARTS_AHEAD} parts of {part_bytes} bytes take over {self._pace_s:g} s, see peer.rate"
        return ""

    def _staged(self, stage: r.AnyStage, address: int = 0, checks: bytes = b"", gone: bytes = b"") -> r.Staged:
        """The answer to a Stage; without an address none of its rows."""
        return r.Staged(stage.pull, stage.part, self._engine.server, self._engine.life, address, checks, gone)

    def _can_be(self, offered: _Offered, stage: r.AnyStage) -> bool:
        """Whether there can be such a part: each number has one range at most."""
        is_new = stage.part not in offered.parts and stage.part not in offered.tasks
        return is_new and stage.first + stage.rows <= offered.rows and len(offered.tasks) < PARTS_MAX

    async def _greet(self, stage: r.StageInto, answer: Answer, puller: PullingNode) -> None:
        """Write a page, whatever it has, so that the connection is made."""
        taken = self._engine.reserve_range(Half.SERVED, GREETING_BYTES, puller.peer)
        if taken is None:
            answer(self._staged(stage))
        else:
            answer(await self._write(taken, stage, puller) or self._staged(stage, stage.address))

    async def _write(self, taken: BounceRange, stage: r.StageInto, puller: PullingNode) -> r.Refused | None:
        """Write a range to where a node wants it, and give it back; a refusal where that fails. Ends when nothing of it can be
        written any more."""
        try:
            end = await self._engine.write(taken, stage, puller=puller, size=taken.size)
        finally:
            self._engine.give(taken)
        code = r.RefusalCode.TRANSPORT if end is MoveEnd.UNBEGUN else r.RefusalCode.UNWRITTEN
        text = f"{self._engine.settings.title} of this node could not write"
        return None if end is MoveEnd.DONE else r.Refused(code, text)

    async def _stage(self, offered: _Offered, stage: r.AnyStage, answer: Answer, puller: PullingNode) -> None:
        deadline = Deadline(stage.wait_ms / 1000, self._clock)
        begin = Deadline(stage.wait_ms / 1000 + r.INTO_BEGIN_S, self._clock)
        size = offered.chunks.extent_bytes
        most = min(stage.rows, self._engine.part_bytes(size) // size)
        rows = await self._wait_for_rows(offered, stage.first, most, deadline) if most else None
        taken = await self._wait_for_room(len(rows.checks) * size, offered.peer, deadline) if rows else None
        if rows is None or taken is None:
            answer(self._staged(stage))
            return
        copying = asyncio.get_running_loop().run_in_executor(self._threads, self._copy, rows, taken)
        try:
            checks, gone = await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(lambda _: self._engine.give(taken))
            raise
        if taken.memory is not self._engine.process.memory:
            self._engine.give(taken)
            answer(r.Refused(r.RefusalCode.TRANSPORT, f"{self._engine.settings.title} of this node has ended"))
            return
        offered.parts[stage.part] = taken  # before any further wait: whoever drops the offer gives the range back
        self._engine.counts["served_bytes"] += taken.size
        await self._keep_pace(offered.peer, taken.size)
        address = self._engine.address_of(taken)
        if isinstance(stage, r.StageInto):
            address = stage.address
            is_wanted = offered.parts.pop(stage.part, None) is not None
            if is_wanted and begin.has_passed():  # its puller would no longer wait for the end
                self._engine.give(taken)
            if not is_wanted or begin.has_passed():
                answer(self._staged(stage))
                return
            offered.writing.add(stage.part)
            refusal = await self._write(taken, stage, puller)
            if refusal is not None:
                answer(refusal)
                return
        answer(self._staged(stage, address, checks, gone))

    async def _wait_for_rows(self, offered: _Offered, first: int, most: int, deadline: Deadline) -> _Rows | None:
        """The first rows that have landed, or whose chunks have gone; None where the first one does neither in time."""
        if offered.checks is not None:
            return _Rows(offered, first, offered.checks[first : first + most].tolist())
        checks: list[int | None] = []
        while not checks and not deadline.has_passed():
            for row in range(first, first + min(most, LANDING_ROWS_MAX)):
                found = self._look_at(offered, row)
                if found == LANDING:
                    break
                checks.append(found)
            if not checks:
                await asyncio.sleep(LOOK_S)
        return _Rows(offered, first, checks) if checks else None

    def _look_at(self, offered: _Offered, row: int) -> int | None:
        """The checksum of a row, LANDING, or None where its chunk has gone."""
        extent, chunk = divmod(row, len(offered.offsets))
        offsets, slots, generations = (one[8 * chunk : 8 * chunk + 8] for one in offered.chunks.columns)
        one = OfferedChunks((offsets, slots, generations), extent + 1, offered.chunks.extent_bytes)
        checks = self._checks(one)
        if checks:
            return int.from_bytes(checks[-CHECKSUM_BYTES:], "little")
        return LANDING if self._is_there(offered, chunk) else None

    def _is_there(self, offered: _Offered, chunk: int) -> bool:
        """Whether a chunk is in its slot."""
        return self._index.generation_at(offered.slots[chunk]) == offered.generations[chunk]

    async def _wait_for_room(self, size: int, peer: str, deadline: Deadline) -> BounceRange | None:
        while True:
            taken = self._engine.reserve_range(Half.SERVED, size, peer)
            if taken is not None or deadline.has_passed() or not self._engine.is_serving:
                return taken
            await self._engine.room(Half.SERVED, deadline.remaining_s())

    async def _keep_pace(self, peer: str, size: int) -> None:
        """Wait until a node may read so many bytes more."""
        if not self._bytes_per_s:
            return
        now_ns = self._clock.now_ns()
        self._free_ns = {name: free_ns for name, free_ns in self._free_ns.items() if free_ns > now_ns}
        free_ns = self._free_ns.get(peer, now_ns)
        self._free_ns[peer] = free_ns + size * NS_PER_S // self._bytes_per_s
        await asyncio.sleep((free_ns - now_ns) / NS_PER_S)

    def _copy(self, rows: _Rows, taken: BounceRange) -> tuple[bytes, bytes]:
        """Copy rows one behind the other: their checksums, and which have gone. On a thread."""
        offered, size = rows.offered, rows.offered.chunks.extent_bytes
        checks, gone = bytearray(), bytearray()
        for number, check in enumerate(rows.checks):
            extent, chunk = divmod(rows.first + number, len(offered.offsets))
            target, found = (taken.offset + number * size).to_bytes(8, "little"), b""
            if check is not None:
                source = offered.offsets[chunk] + extent * size
                found = kvpool_native.copy_extents(taken.memory, target, self._arena, source, 1, size)
            # The generation after the copy: the bytes are this chunk's.
            is_good = bool(found) and int.from_bytes(found, "little") == check and self._is_there(offered, chunk)
            checks += found if is_good else bytes(CHECKSUM_BYTES)
            gone.append(not is_good)
        return bytes(checks), bytes(gone)
