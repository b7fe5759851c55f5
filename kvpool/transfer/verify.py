"""Recompute the checksums of chunks in place.

An immutable job for the transfer threads: the caller holds the chunks for as long as it runs. Reads each byte once,
copies none.
"""

from dataclasses import dataclass

import kvpool_native


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Where a chunk lies and what it must be: checksums are u32 little endian, one for each layer."""

    key: bytes
    offset: int
    layer_bytes: int
    checksums: bytes


def find_corrupt(arena: kvpool_native.Mapping, extents: tuple[ChunkExtent, ...]) -> tuple[bytes, ...]:
    """The keys of the chunks whose bytes do not match their checksums."""
    return tuple(extent.key for extent in extents if not _is_intact(arena, extent))


def _is_intact(arena: kvpool_native.Mapping, extent: ChunkExtent) -> bool:
    expected = memoryview(extent.checksums).cast("I")
    found = kvpool_native.extent_checksums(arena, extent.offset, extent.layer_bytes, len(expected))
    return found == extent.checksums
