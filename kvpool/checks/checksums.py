"""Checksum jobs for the transfer threads: recompute the checksums of chunks in place.

The caller holds the chunks while it runs. Reads each byte once, copies none. A verdict is about the generation that was read:
where the slot has another one afterwards, there is no verdict.
"""

from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.ids import ChunkExtent, CorruptChunk
from kvpool.packed_numbers import u32_of
from kvpool.transfer.workers import Workers


def find_corrupt(
    arena: kvpool_native.Mapping, index: kvpool_native.IndexView, extents: tuple[ChunkExtent, ...]
) -> tuple[CorruptChunk, ...]:
    """The chunks whose bytes do not match the checksums in the index."""
    failpoint.reach("daemon.verify.job")
    compared = (CorruptChunk(chunk, _bad_extents(arena, index, chunk)) for chunk in extents)
    return tuple(corrupt for corrupt in compared if corrupt.bad)


async def find_corrupt_on(
    workers: Workers, arena: kvpool_native.Mapping, index: kvpool_native.IndexView, extents: tuple[ChunkExtent, ...]
) -> tuple[CorruptChunk, ...]:
    """The same on the thread of checks. Raises Refused when too many checks are waiting."""
    return await workers.check(partial(find_corrupt, arena, index, extents))


def _bad_extents(arena: kvpool_native.Mapping, index: kvpool_native.IndexView, chunk: ChunkExtent) -> tuple[int, ...]:
    """The extents of a chunk that differ; none where its slot has another generation by now."""
    expected = b"".join(index.checksum_at(chunk.slot, extent).to_bytes(4, "little") for extent in range(chunk.extents))
    found = kvpool_native.extent_checksums(arena, chunk.offset, chunk.extent_bytes, chunk.extents)
    if found == expected or index.generation_at(chunk.slot) != chunk.generation:
        return ()
    pairs = zip(u32_of(found), u32_of(expected), strict=True)
    return tuple(extent for extent, (own, wanted) in enumerate(pairs) if own != wanted)
