"""Scrub: reads stored chunks and compares checksums, for an operator, a slice at a time, in every tier.

The requester names records in order: all of a tier are a full check, drawn ones a sample. There is no state between two slices,
so a check ends when no further slice is requested. Each chunk has a pin while it is read, even if the requester has gone; no
slice begins while PINNED_CHUNKS_MAX have one.

A read does not count as a use of a chunk, and does not change the order of eviction.

Control thread only; the bytes are read by `DramCheck` and `ChecksumJobs`. Invariant: every pin of a
slice is given to one of these two, which release it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kvpool_native
from kvpool.checks.checksum_jobs import ChecksumJobs, ChecksumResult, Stored
from kvpool.checks.dram_check import DramCheck, Dropped
from kvpool.errors import Refused
from kvpool.ids import ChunkExtent, HoldId, NamespaceId
from kvpool.index.namespaces import Namespaces
from kvpool.layout import Layout
from kvpool.layouts.extent_names import where_in
from kvpool.states import Level

SLICE_CHUNKS = 16
SLICE_BYTES = 64 << 20
PINNED_CHUNKS_MAX = 8 * SLICE_CHUNKS
# A guess: a hundred times what an idle disk needs for a slice.
SLICE_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk with wrong bytes, or one that could not be read. `tier`: the name. `where`: in which extents, in words; empty for
    a plain layout, and in lower tiers the group alone."""

    tier: str
    key: bytes
    fault: str
    dropped: int
    where: str = ""

    def to_report(self) -> dict[str, Any]:
        """As plain values; `where` only where it is known."""
        report = {"tier": self.tier, "key": self.key.hex(), "fault": self.fault, "dropped": self.dropped}
        return report | {"where": self.where} if self.where else report


@dataclass(frozen=True, slots=True)
class ScrubSlice:
    """Result of a slice: records examined, chunks and bytes read, and the bad ones."""

    looked_at: int
    chunks: int
    bytes: int
    bad: list[BadChunk]

    def to_report(self) -> dict[str, Any]:
        """As plain values."""
        bad = [one.to_report() for one in self.bad]
        return {"looked_at": self.looked_at, "chunks": self.chunks, "bytes": self.bytes, "bad": bad}


@dataclass(frozen=True, slots=True)
class _Pinned:
    level: Level
    pin: HoldId
    key: bytes
    offset: int
    generation: int
    namespace: NamespaceId
    extents: int
    size: int


class Scrub:
    """Reads slices. `checksum_jobs`: those of each lower tier."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        dram_check: DramCheck,
        namespaces: Namespaces,
        checksum_jobs: Sequence[ChecksumJobs],
    ) -> None:
        self._checksum_jobs = {one.tier.level: one for one in checksum_jobs}
        self._names = {Level.DRAM: Level.DRAM.name.lower()} | {
            level: one.tier.name for level, one in self._checksum_jobs.items()
        }
        self._directories = {Level.DRAM: directory}
        self._directories |= {level: one.tier.slots.directory for level, one in self._checksum_jobs.items()}
        self._dram_check = dram_check
        self._namespaces = namespaces
        self.verified_chunks = 0

    def __repr__(self) -> str:
        return f"<Scrub {self.pinned_chunks} chunks pinned>"

    @property
    def pinned_chunks(self) -> int:
        """Chunks that are being read."""
        return self._dram_check.pins + sum(one.pins for one in self._checksum_jobs.values())

    def tiers(self) -> dict[str, dict[str, int]]:
        """By tier: its level, the number of chunks, and of records where they may be."""
        return {
            self._names[level]: {"level": level, **{name: directory.stats()[name] for name in ("chunks", "entries")}}
            for level, directory in self._directories.items()
        }

    async def read(self, places: Iterable[tuple[int, int]], chunks_max: int) -> ScrubSlice:
        """Read the chunks of these records (level, index), `chunks_max` at most, and no more than fit a slice.

        Raises Refused when too much is being read, or a lower tier cannot be.
        """
        if self.pinned_chunks >= PINNED_CHUNKS_MAX:
            raise Refused("busy", f"{self.pinned_chunks} chunks are being read by other checks: try again later")
        looked_at, pinned = self._pin(places, min(chunks_max, SLICE_CHUNKS))
        # From here on every pin has an owner: nothing is awaited before.
        below = [entry for entry in pinned if entry.level is not Level.DRAM]
        started = [self._start(entry) for entry in below]
        slow = [comparison for comparison in started if comparison is not None]
        fast = asyncio.shield(self._check([entry for entry in pinned if entry.level is Level.DRAM]))
        try:
            corrupt, compared = await asyncio.wait_for(_settled(fast, slow), SLICE_WAIT_S)
        except asyncio.TimeoutError as error:
            raise Refused("busy", f"not read within {SLICE_WAIT_S:.0f} s: engines keep the disk busy") from error
        for entry, comparison in zip(below, started, strict=True):
            if comparison is None:
                name = self._names[entry.level]
                raise Refused("busy", f"the {name} tier cannot be read just now: its state is in the statistics")
        self.verified_chunks += len(pinned)
        names = self._names
        bad = [BadChunk(names[Level.DRAM], key, "bad_checksum", *dropped) for key, dropped in corrupt.items()]
        bad += [
            BadChunk(names[entry.level], one.key, one.fault, one.dropped, where_in(self._layout_of(entry), ()))
            for entry, one in zip(below, compared, strict=True)
            if one.fault
        ]
        return ScrubSlice(looked_at, len(pinned), sum(entry.size for entry in pinned), bad)

    def _pin(self, places: Iterable[tuple[int, int]], chunks_max: int) -> tuple[int, list[_Pinned]]:
        pinned: list[_Pinned] = []
        looked_at = size = 0
        for level, place in places:
            if len(pinned) == chunks_max or size >= SLICE_BYTES:
                break
            looked_at += 1
            directory = self._directories.get(Level(level))
            if directory is None:
                continue
            page = directory.records(place, 1, place + 1)
            for row in page.records:
                namespace = NamespaceId(row.namespace)
                chunk_bytes = self._namespaces.by_id(namespace).layout.stored_bytes
                size += chunk_bytes
                pinned.append(
                    _Pinned(
                        level=Level(level),
                        pin=HoldId(page.pin),
                        key=row.key,
                        offset=row.offset,
                        generation=row.generation,
                        namespace=namespace,
                        extents=row.extents,
                        size=chunk_bytes,
                    )
                )
        return looked_at, pinned

    def _check(self, pinned: list[_Pinned]) -> "asyncio.Task[dict[bytes, Dropped]]":
        extents = tuple(
            ChunkExtent(
                entry.key,
                entry.generation,
                entry.offset,
                self._slot_of(entry),
                entry.size // entry.extents,
                entry.extents,
            )
            for entry in pinned
        )
        layouts = [self._layout_of(entry) for entry in pinned]
        return self._dram_check.check_pinned(extents, partial(self._unpin, pinned), layouts=layouts)

    def _layout_of(self, entry: _Pinned) -> Layout:
        return self._namespaces.by_id(entry.namespace).layout

    def _slot_of(self, entry: _Pinned) -> int:
        return int.from_bytes(self._directories[entry.level].columns([entry.pin]).slots, "little")

    def _start(self, entry: _Pinned) -> "asyncio.Future[ChecksumResult] | None":
        chunk = Stored(entry.key, entry.pin, entry.offset, entry.generation, entry.namespace)
        return self._checksum_jobs[entry.level].start(chunk)

    def _unpin(self, pinned: list[_Pinned]) -> None:
        for entry in pinned:
            self._directories[entry.level].unpin(entry.pin)


async def _settled(
    fast: "asyncio.Future[dict[bytes, Dropped]]", slow: "list[asyncio.Future[ChecksumResult]]"
) -> tuple[dict[bytes, Dropped], list[ChecksumResult]]:
    return await fast, [await comparison for comparison in slow]
