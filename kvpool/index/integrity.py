"""Whether what is in DRAM is what it claims to be: chunks that a client or a check wants compared with their checksums.

Has the bytes of held chunks read elsewhere (by the `find_corrupt` it is given), and drops those that are bad, with what
hangs on them. A chunk is held while it is read, so it cannot be replaced meanwhile, whatever becomes of who asked.
Control thread only; `find_corrupt` runs on the transfer threads.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import kvpool_native
from kvpool.types import ChunkExtent, HoldId

log = logging.getLogger(__name__)

FindCorrupt = Callable[[tuple[ChunkExtent, ...]], Awaitable[tuple[bytes, ...]]]


class Integrity:
    """The pool's conscience.

    Invariant: `checksum_failures` counts the chunks found corrupt; `holds_in_use` the holds it has in the directory.
    """

    def __init__(self, directory: kvpool_native.Directory, find_corrupt: FindCorrupt) -> None:
        self._directory = directory
        self._find_corrupt = find_corrupt
        self.checksum_failures = 0
        self.corrupt_reports = 0
        self.holds_in_use = 0

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"checksum_failures": self.checksum_failures, "corrupt_reports": self.corrupt_reports}

    async def check_reported(self, hold: HoldId, chunk: int, chunk_bytes: int, layers: int, now_ns: int) -> None:
        """Read a chunk of a hold that a client found corrupt; drop it if it is."""
        self.corrupt_reports += 1
        offsets, _, _ = self._directory.columns(hold)
        offset = int.from_bytes(offsets[chunk * 8 : chunk * 8 + 8], "little")
        extent = ChunkExtent(self._directory.key_of(hold, chunk), offset, chunk_bytes // layers, layers)
        kept = HoldId(self._directory.duplicate(hold))
        await asyncio.shield(self.check_held((extent,), lambda: self._directory.release(kept, now_ns)))

    def check_held(
        self, extents: tuple[ChunkExtent, ...], release: Callable[[], object]
    ) -> "asyncio.Task[dict[bytes, int]]":
        """Read chunks that are held until it calls `release`: those that are corrupt, and how many went with each.

        The task goes on when who waits for it is cancelled: await it behind a shield.
        """
        self.holds_in_use += len(extents)
        return asyncio.ensure_future(self._read(extents, release))

    async def _read(self, extents: tuple[ChunkExtent, ...], release: Callable[[], object]) -> dict[bytes, int]:
        try:
            corrupt = await self._find_corrupt(extents) if extents else ()
            return {key: self._drop(key) for key in corrupt}
        finally:
            self.holds_in_use -= len(extents)
            release()

    def _drop(self, key: bytes) -> int:
        self.checksum_failures += 1
        dropped = self._directory.drop(key)
        log.error("chunk %s is corrupt: %d chunks dropped", key.hex()[:16], dropped)
        return dropped
