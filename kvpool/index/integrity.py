"""Whether what is stored is what it claims to be: reports of corrupt chunks, and the deep check.

Finds the chunks and holds them, has their bytes read elsewhere (by the `find_corrupt` it is given), and drops those that
are bad, with what hangs on them. A chunk is held while it is read, so it cannot be replaced meanwhile.
Control thread only; `find_corrupt` runs on the transfer threads.
"""

import logging
from collections.abc import Awaitable, Callable

import kvpool_native
from kvpool.types import ChunkExtent, HoldId

log = logging.getLogger(__name__)

BATCH_CHUNKS = 16

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

    async def check_reported(self, hold: HoldId, chunk: int, chunk_bytes: int, layers: int, now_ns: int) -> None:
        """Read a chunk of a hold that a client found corrupt; drop it if it is."""
        self.corrupt_reports += 1
        offsets, _, _ = self._directory.columns(hold)
        offset = int.from_bytes(offsets[chunk * 8 : chunk * 8 + 8], "little")
        extent = ChunkExtent(self._directory.key_of(hold, chunk), offset, chunk_bytes // layers, layers)
        kept = HoldId(self._directory.duplicate(hold))
        await self._check((extent,), kept, now_ns)

    async def check_all(self, now_ns: int) -> tuple[list[bytes], int]:
        """Read every chunk that can be loaded; the keys of the corrupt ones, which stay, and how many were read."""
        corrupt: list[bytes] = []
        verified = cursor = 0
        while True:
            cursor, hold, rows = self._directory.records(cursor, BATCH_CHUNKS)
            extents = tuple(
                ChunkExtent(key, offset, chunk_bytes // layers, layers)
                for key, offset, _, chunk_bytes, layers, _ in rows
            )
            if hold:
                corrupt += await self._read(extents, HoldId(hold), now_ns)
                verified += len(extents)
            if not cursor:
                return corrupt, verified

    async def _check(self, extents: tuple[ChunkExtent, ...], hold: HoldId, now_ns: int) -> None:
        for key in await self._read(extents, hold, now_ns):
            self.checksum_failures += 1
            dropped = self._directory.drop(key)
            log.error("chunk %s is corrupt: %d chunks dropped", key.hex()[:16], dropped)

    async def _read(self, extents: tuple[ChunkExtent, ...], hold: HoldId, now_ns: int) -> tuple[bytes, ...]:
        self.holds_in_use += 1
        try:
            return await self._find_corrupt(extents)
        finally:
            self.holds_in_use -= 1
            self._directory.release(hold, now_ns)
