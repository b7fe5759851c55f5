"""DRAM check: compares chunks in DRAM with their checksums, on the request of a client or an operator.

Other threads read the bytes of pinned chunks (`find_corrupt`); bad chunks are dropped, with their descendants. A chunk has a
pin while it is read, so its slot is not reused meanwhile, even if the requester is gone. A verdict is about the generation that
was read and about no other. A chunk that has not landed has no bytes to check yet: a report about it is only counted.

Control thread only; `find_corrupt` runs on the transfer threads.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import kvpool_native
from kvpool.types import ChunkExtent, HoldId

log = logging.getLogger(__name__)

FindCorrupt = Callable[[tuple[ChunkExtent, ...]], Awaitable[tuple[ChunkExtent, ...]]]


class DramCheck:
    """Checks of DRAM chunks in one pool.

    Invariant: `checksum_failures` counts the chunks found corrupt; `pins` the pins it has in the directory.
    """

    def __init__(self, directory: kvpool_native.Directory, find_corrupt: FindCorrupt) -> None:
        self._directory = directory
        self._find_corrupt = find_corrupt
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

    async def check_reported(self, hold: HoldId, chunk: int, *, chunk_bytes: int, layers: int) -> None:
        """Read a chunk of a hold that a client found corrupt, and drop it if it is. Does nothing where it is not in DRAM."""
        self.corrupt_reports += 1
        pin = self._directory.pin_chunk(hold, chunk)
        if not pin:
            self.corrupt_reports_early += 1
            return
        held = self._directory.columns(pin)
        columns = (held.offsets, held.generations, held.slots)
        offset, generation, slot = (int.from_bytes(column, "little") for column in columns)
        extent = ChunkExtent(self._directory.key_of(pin, 0), generation, offset, slot, chunk_bytes // layers, layers)
        await asyncio.shield(self.check_pinned((extent,), lambda: self._directory.unpin(pin)))

    def check_pinned(
        self, extents: tuple[ChunkExtent, ...], unpin: Callable[[], object]
    ) -> "asyncio.Task[dict[bytes, int]]":
        """Read chunks that have pins until it calls `unpin`: those that are corrupt, and how many were dropped with each.

        The task continues when its awaiter is cancelled: await it through a shield.
        """
        self.pins += len(extents)
        return asyncio.ensure_future(self._read(extents, unpin))

    async def _read(self, extents: tuple[ChunkExtent, ...], unpin: Callable[[], object]) -> dict[bytes, int]:
        try:
            corrupt = await self._find_corrupt(extents) if extents else ()
            return {extent.key: self._drop(extent) for extent in corrupt}
        finally:
            self.pins -= len(extents)
            unpin()

    def _drop(self, extent: ChunkExtent) -> int:
        self.checksum_failures += 1
        dropped = self._directory.drop(extent.key, extent.generation)
        log.error("chunk %s is corrupt: %d chunks dropped", extent.key.hex()[:16], dropped)
        return dropped
