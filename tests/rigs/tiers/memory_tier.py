"""A backing tier in memory, and a pool that has it under DRAM: the whole contract of a tier, in one short file.

Real in what the interface asks for: bounded, its bytes checked against checksums on every way, jobs on a thread of its own that
end in any order, rows that another life finds again. Failures come on order, chunk by chunk.

    Medium      what outlives a daemon: bytes, and the row of each published chunk
    Fault       what becomes of the next chunks
    MemoryTier  the tier itself

Threads: the control thread, but for `_run`, which has one of its own; `_ended` is guarded by `_lock`.
"""

import asyncio
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

import kvpool_native
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.errors import KVPoolError
from kvpool.ids import KEY_BYTES
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout, WireLayout
from kvpool.packed_rows import RESTORE_ROW
from kvpool.pool.lower_tiers import Planner, Site, TierPlan
from kvpool.states import DEFAULT_PRIORITY, Level
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    Moves,
    Outcome,
    TierOwner,
    TierState,
)
from kvpool.tiers.slots import Slots, SlotSizes

ENDED_AT_ONCE = 32
STOP_TIMEOUT_S = 10.0
CRC_BYTES = 4


class Fault(Enum):
    """The outcome of a chunk: success, an error without a word, no report before `MemoryTier.release_withheld`.

    No correct tier reports a chunk as read of which nothing has landed (UNLANDED), or lands its last extent first (DISORDERED).
    """

    NONE = "none"
    ERROR = "error"
    WITHHELD = "withheld"
    UNLANDED = "unlanded"
    DISORDERED = "disordered"


@dataclass(frozen=True)
class StoredRow:
    """A published chunk, as another life finds it."""

    parent: bytes
    model: str
    wire: WireLayout
    offset: int
    generation: int
    order: int  # of being published: parents before their children
    priority: int
    duration_ms: int


@dataclass
class Medium:
    """Bytes that outlive a daemon, and what is known of them. `checksums`: of each slot's extents, by offset and generation."""

    sizes: SlotSizes
    rows: dict[bytes, StoredRow] = field(default_factory=dict)
    checksums: dict[int, tuple[bytes, int, bytes]] = field(default_factory=dict)  # offset: key, generation, CRC-32C
    last_generation: int = 0
    orders: int = 0

    def __post_init__(self) -> None:
        size = self.sizes.segments * self.sizes.segment_bytes
        self.memory = kvpool_native.Mapping.create("memory-tier", size)

    def spoil(self, key: bytes) -> None:
        """Change a byte of a chunk."""
        at = self.rows[key].offset
        self.memory.view()[at] ^= 0xFF


@dataclass(frozen=True)
class _Job:
    number: JobId
    kind: str
    layout: Layout
    moves: Moves


def name_of(level: Level) -> str:
    """A tier's name: no other has it beside this one."""
    return "memory" if level is Level.SSD else f"memory-{level.name.lower()}"


class MemoryTier:
    """The tier itself; see the module, and `Backing`."""

    headers = None
    is_answering = True

    def __init__(
        self, medium: Medium, level: Level, seed: int, memory: ArenaMemory, config: Config, clock: Clock
    ) -> None:
        self.write_policy = config.ssd
        self.name = name_of(level)
        self.level = level
        self.medium = medium
        self.slots = Slots(self.name, level, medium.sizes)
        self.slots.directory.cap_retained(config.dram.retained_quota)
        self.slots.directory.bound_chains(config.server.max_chain_chunks)
        self.state = TierState.STARTING
        self.fault_of: Callable[[str, bytes], Fault] = lambda _kind, _key: Fault.NONE
        self.accepts_jobs = True
        self._random = random.Random(seed)
        self._memory = memory
        self._clock = clock
        self._index = kvpool_native.IndexView(memory.index)
        self._landings = kvpool_native.LandingBoard(memory.index)
        self._owner: TierOwner = UNOWNED
        self._jobs = 0
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[Finished] = []  # guarded by _lock
        self._withheld: list[Finished] = []  # guarded by _lock
        self._thread = threading.Thread(target=self._run, name="memory-tier", daemon=True)
        self._loops: list[asyncio.AbstractEventLoop] = []  # the one that serves, once it is started
        self._bytes = {"read": 0, "write": 0, "check": 0}

    def __repr__(self) -> str:
        return f"<MemoryTier {len(self.medium.rows)} chunks, {self.state.name.lower()}>"

    @property
    def can_read(self) -> bool:
        return self.accepts_jobs and self.state in (TierState.OK, TierState.READONLY)

    @property
    def can_write(self) -> bool:
        return self.accepts_jobs and self.state == TierState.OK

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        self._owner = owner
        self._loops.append(asyncio.get_running_loop())
        self._restore(namespaces)
        self._thread.start()
        self.state = TierState.OK
        self._loops[0].call_soon(owner.on_completed)

    async def close(self) -> bool:
        self.state = TierState.OFFLINE
        self._queue.put(None)
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def reconfigure(self, config: Config) -> None:
        """Nothing of it changes."""

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        return self._start("read", namespace, moves) if self.can_read else NOT_STARTED

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        return self._start("write", namespace, moves) if self.can_write else NOT_STARTED

    def check(self, namespace: Namespace, moves: Moves) -> JobId:
        return self._start("check", namespace, moves) if self.can_read else NOT_STARTED

    def completed(self) -> list[Finished]:
        with self._lock:
            taken, self._ended = self._ended[:ENDED_AT_ONCE], self._ended[ENDED_AT_ONCE:]
            has_more = bool(self._ended)
        if has_more:
            self._loops[0].call_soon(self._owner.on_completed)
        return taken

    def release_withheld(self) -> int:
        """Report the withheld chunks, last first; their number."""
        with self._lock:
            released, self._withheld = self._withheld[::-1], []
            self._ended += released
        self._loops[0].call_soon(self._owner.on_completed)
        return len(released)

    def repeat_withheld(self) -> None:
        """Report the withheld chunks, each twice: a correct tier never does so."""
        with self._lock:
            self._ended += 2 * self._withheld
            self._withheld = []
        self._loops[0].call_soon(self._owner.on_completed)

    @property
    def withheld(self) -> int:
        """Chunks that have ended and are not reported."""
        with self._lock:
            return len(self._withheld)

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        self.keep_up()
        for chunk in chunks:
            self.medium.orders += 1
            self.medium.rows[moves.keys[chunk]] = StoredRow(
                moves.parents[chunk],
                namespace.model,
                namespace.layout.to_wire(),
                moves.offsets[chunk],
                moves.generations[chunk],
                self.medium.orders,
                DEFAULT_PRIORITY,
                0,
            )
            self.touch(moves.keys[chunk])

    def touch(self, key: bytes) -> None:
        row = self.medium.rows.get(key)
        if row is not None:
            priority, duration_ms = self.slots.directory.retention(key) or (DEFAULT_PRIORITY, 0)
            self.medium.rows[key] = replace(row, priority=priority, duration_ms=duration_ms)

    def keep_up(self) -> None:
        for column, act in (
            (self.slots.directory.take_departed(), lambda key: self.medium.rows.pop(key, None)),
            (self.slots.directory.take_expired(), self.touch),
        ):
            for at in range(0, len(column), KEY_BYTES):
                act(column[at : at + KEY_BYTES])

    def checkpoint(self, timeout_s: float) -> bool:
        return True

    def forget_namespace(self, namespace: Namespace) -> None:
        """Rows name their namespace by model and layout."""

    async def note_flushed(self, namespaces: Sequence[Namespace] | None, generation: int | None) -> bool:
        """Dropped chunks leave the rows with the next `keep_up`."""
        return True

    def stats(self) -> Counters:
        return {
            f"{self.name}.state": self.state.name.lower(),
            f"{self.name}.read_bytes": self._bytes["read"],
            f"{self.name}.written_bytes": self._bytes["write"],
        }

    def info(self) -> Info:
        return {"memory_bytes": self.medium.memory.size}

    def verify(self) -> list[str]:
        """Rows of chunks that the directory does not have, after departures were noted."""
        self.keep_up()
        strangers = [key for key in self.medium.rows if self.slots.directory.retention(key) is None]
        return [f"memory: {len(strangers)} rows of chunks that are not there"] if strangers else []

    def problems(self) -> list[str]:
        is_dead = self.state == TierState.OK and not self._thread.is_alive()
        return ["memory: its thread has died"] if is_dead else []

    def shortcomings(self) -> list[str]:
        return []

    def _start(self, kind: str, namespace: Namespace, moves: Moves) -> JobId:
        self._jobs += 1
        self.medium.last_generation = max(self.medium.last_generation, *moves.generations)
        self._queue.put(_Job(JobId(self._jobs), kind, namespace.layout, moves))
        return JobId(self._jobs)

    def _restore(self, namespaces: Namespaces) -> None:
        """Rows, parents before children; those without a stored parent are dropped."""
        rows = sorted(self.medium.rows.items(), key=lambda item: item[1].order)
        packed = np.zeros(1, RESTORE_ROW)
        for key, row in rows:
            try:
                namespace = namespaces.open(row.model, Layout.from_wire(row.wire))
            except KVPoolError:
                del self.medium.rows[key]
                continue
            size_class = self.slots.size_class_of(namespace.layout)
            packed[0] = (
                key, row.parent.ljust(KEY_BYTES, b"\0"), row.offset, row.generation, namespace.id, size_class, row.priority,
                row.duration_ms,
            )  # fmt: skip
            if self.slots.directory.restore(packed.tobytes(), self._clock.now_ns()) != b"\1":
                del self.medium.rows[key]
        self.slots.directory.finish_restore(self.medium.last_generation)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            order = list(range(len(job.moves)))
            self._random.shuffle(order)
            for chunk in order:
                self._end(job, chunk)

    def _end(self, job: _Job, chunk: int) -> None:
        key = job.moves.keys[chunk]
        fault = self.fault_of(job.kind, key)
        if fault is Fault.ERROR:
            if job.kind == "read":
                self._landings.fail(job.moves.arena_slots[chunk])
            finished = Finished(job.number, chunk, Outcome.FAILED)
        elif fault in (Fault.UNLANDED, Fault.DISORDERED):
            if fault is Fault.DISORDERED:
                last, crc = job.layout.extents - 1, self._expected(job, chunk)[-CRC_BYTES:]
                self._landings.land(job.moves.arena_slots[chunk], last, crc)
            finished = Finished(job.number, chunk, Outcome.DONE)
        else:
            move = {"read": self._read, "write": self._write, "check": self._check}[job.kind]
            is_good = move(job, chunk)
            outcome = Outcome.DONE if is_good else Outcome.BAD_SOURCE
            finished = Finished(job.number, chunk, outcome, "" if is_good else "bad_checksum")
            self._bytes[job.kind] += job.layout.stored_bytes
        with self._lock:
            (self._withheld if fault is Fault.WITHHELD else self._ended).append(finished)
        if self.state == TierState.OK:
            self._loops[0].call_soon_threadsafe(self._owner.on_completed)

    def _write(self, job: _Job, chunk: int) -> bool:
        """Copy, and compare the stored bytes with the index's checksums."""
        moves, extents = job.moves, job.layout.extents
        offset, arena_offset = moves.offsets[chunk], moves.arena_offsets[chunk]
        stored = self._copy(self.medium.memory, offset, self._memory.arena, arena_offset, job.layout)
        expected = b"".join(
            self._index.checksum_at(moves.arena_slots[chunk], extent).to_bytes(CRC_BYTES, "little")
            for extent in range(extents)
        )
        self.medium.checksums[offset] = (moves.keys[chunk], moves.generations[chunk], expected)
        return stored == expected

    def _read(self, job: _Job, chunk: int) -> bool:
        """Extent after extent: copy, compare the bytes in the arena, announce the extent."""
        moves, extent_bytes = job.moves, job.layout.extent_bytes
        expected, target = self._expected(job, chunk), moves.arena_offsets[chunk]
        for extent in range(job.layout.extents if expected else 0):
            at, crc = extent * extent_bytes, expected[extent * CRC_BYTES : (extent + 1) * CRC_BYTES]
            view = self._memory.arena.view()[target + at : target + at + extent_bytes]
            view[:] = self.medium.memory.view()[moves.offsets[chunk] + at : moves.offsets[chunk] + at + extent_bytes]
            if kvpool_native.crc32c(view).to_bytes(CRC_BYTES, "little") != crc:
                break
            self._landings.land(moves.arena_slots[chunk], extent, crc)
        else:
            if expected:
                return True
        self._landings.fail(moves.arena_slots[chunk])
        return False

    def _check(self, job: _Job, chunk: int) -> bool:
        extent_bytes, offset = job.layout.extent_bytes, job.moves.offsets[chunk]
        found = kvpool_native.extent_checksums(self.medium.memory, offset, extent_bytes, job.layout.extents)
        return found == self._expected(job, chunk)

    def _expected(self, job: _Job, chunk: int) -> bytes:
        """The checksums of a slot's extents; nothing where it is another chunk's."""
        key, generation, sums = self.medium.checksums.get(job.moves.offsets[chunk], (b"", 0, b""))
        return sums if (key, generation) == (job.moves.keys[chunk], job.moves.generations[chunk]) else b""

    def _copy(
        self, target: kvpool_native.Mapping, at: int, source: kvpool_native.Mapping, start: int, layout: Layout
    ) -> bytes:
        extent_bytes = layout.extent_bytes
        return kvpool_native.copy_extents(target, at.to_bytes(8, "little"), source, start, layout.extents, extent_bytes)


def planner(medium: Medium, made: list[MemoryTier], *, level: Level = Level.SSD, seed: int = 1) -> Planner:
    """A line of the pool's composition: makes the tier over this medium and adds it to the list."""

    def link(site: Site) -> LowerLink:
        made.append(MemoryTier(medium, level, seed, site.memory, site.config, site.clock))
        return site.lower(made[-1])

    plan = TierPlan(link, further_entries=medium.sizes.max_chunks, descriptors=1)
    return lambda _config: plan
