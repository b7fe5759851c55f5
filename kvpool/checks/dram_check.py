"""DRAM check: compares chunks in DRAM with their checksums, on the request of a client or an operator.

Other threads read the bytes of pinned chunks (`find_corrupt`); bad chunks are dropped, with their descendants. A chunk has a
pin while it is read, so its slot is not reused meanwhile, even if the requester is gone. A verdict is about the generation that
was read and about no other. A chunk that has not landed has no bytes to check yet: a report about it is only counted.

Control thread only; `find_corrupt` runs on the transfer threads.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import kvpool_native
from kvpool.ids import ChunkExtent, CorruptChunk, HoldId
from kvpool.layout import Layout
from kvpool.layouts.extent_names import where_in
from kvpool.tiers.bad_chunk_log import BadChunkLog

FindCorrupt = Callable[[tuple[ChunkExtent, ...]], Awaitable[tuple[CorruptChunk, ...]]]


class Dropped(NamedTuple):
    """What was dropped with a corrupt chunk, and where in it the wrong bytes are, in words; empty for a plain layout."""

    chunks: int
    where: str


class DramCheck:
    """Checks of DRAM chunks in one pool.

    Invariant: `checksum_failures` counts the chunks found corrupt; `pins` the pins it has in the directory.
    """

    def __init__(
        self, directory: kvpool_native.Directory, find_corrupt: FindCorrupt, bad_chunk_log: BadChunkLog
    ) -> None:
        self._directory = directory
        self._find_corrupt = find_corrupt
        self._bad_chunk_log = bad_chunk_log
        self.checksum_failures = 0
        self.corrupt_reports = 0
        self.corrupt_reports_early = 0
        self.pins = 0

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            "checksum_failures": self.checksum_failures,
            "corrupt_reports": self.corrupt_reports,
            "corrupt_reports_early": self.corrupt_reports_early,
        }

    async def check_reported(self, hold: HoldId, chunk: int, layout: Layout) -> None:
        """Read a chunk of a hold that a client found corrupt, and drop it if it is. Does nothing where it is not in DRAM."""
        self.corrupt_reports += 1
        pin = self._directory.pin_chunk(hold, chunk)
        if not pin:
            self.corrupt_reports_early += 1
            return
        held = self._directory.columns([pin])
        columns = (held.offsets, held.generations, held.slots)
        offset, generation, slot = (int.from_bytes(column, "little") for column in columns)
        key = self._directory.key_of(pin, 0)
        extent = ChunkExtent(key, generation, offset, slot, layout.extent_bytes, layout.extents)
        await asyncio.shield(self.check_pinned((extent,), lambda: self._directory.unpin(pin), layouts=[layout]))

    def check_pinned(
        self, extents: tuple[ChunkExtent, ...], unpin: Callable[[], object], *, layouts: Sequence[Layout]
    ) -> "asyncio.Task[dict[bytes, Dropped]]":
        """Read chunks that have pins until it calls `unpin`: those that are corrupt, and what was dropped with each.

        `layouts`: of each. The task continues when its awaiter is cancelled: await it through a shield.
        """
        self.pins += len(extents)
        by_key = {extent.key: layout for extent, layout in zip(extents, layouts, strict=True)}
        return asyncio.ensure_future(self._read(extents, unpin, by_key))

    async def _read(
        self, extents: tuple[ChunkExtent, ...], unpin: Callable[[], object], layouts: dict[bytes, Layout]
    ) -> dict[bytes, Dropped]:
        try:
            corrupt = await self._find_corrupt(extents) if extents else ()
            return {found.chunk.key: self._drop(found, layouts[found.chunk.key]) for found in corrupt}
        finally:
            self.pins -= len(extents)
            unpin()

    def _drop(self, corrupt: CorruptChunk, layout: Layout) -> Dropped:
        self.checksum_failures += 1
        key, where = corrupt.chunk.key, where_in(layout, corrupt.bad)
        dropped = self._directory.drop(key, corrupt.chunk.generation)
        fault = f"wrong bytes in {where}" if where else "wrong bytes"
        self._bad_chunk_log.note_bad_chunk(key, fault, f"offset {corrupt.chunk.offset} of the arena")
        return Dropped(dropped, where)
