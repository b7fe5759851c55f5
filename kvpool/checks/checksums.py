"""Checksum jobs for the transfer threads: recompute the checksums of chunks in place.

The caller holds the chunks while it runs. Reads each byte once, copies none. A verdict is about the generation that was read:
where the slot has another one afterwards, there is no verdict.
"""

from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.transfer.workers import Workers
from kvpool.types import ChunkExtent


def find_corrupt(
    arena: kvpool_native.Mapping, index: kvpool_native.IndexView, extents: tuple[ChunkExtent, ...]
) -> tuple[ChunkExtent, ...]:
    """The chunks whose bytes do not match the checksums in the index."""
    failpoint.reach("daemon.verify.job")
    return tuple(extent for extent in extents if _is_corrupt(arena, index, extent))


async def find_corrupt_on(
    workers: Workers, arena: kvpool_native.Mapping, index: kvpool_native.IndexView, extents: tuple[ChunkExtent, ...]
) -> tuple[ChunkExtent, ...]:
    """The same on the thread of checks. Raises Refused when too many checks are waiting."""
    return await workers.check(partial(find_corrupt, arena, index, extents))


def _is_corrupt(arena: kvpool_native.Mapping, index: kvpool_native.IndexView, extent: ChunkExtent) -> bool:
    expected = b"".join(index.checksum_at(extent.offset, layer).to_bytes(4, "little") for layer in range(extent.layers))
    found = kvpool_native.extent_checksums(arena, extent.offset, extent.layer_bytes, extent.layers)
    return found != expected and index.generation_at(extent.offset) == extent.generation
