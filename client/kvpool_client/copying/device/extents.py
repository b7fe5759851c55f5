"""Extents that an engine on a device has of every chunk: where each lies in a chunk, by the engine's own number for it, which
is that in the view of its memory. Immutable; any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.layout import Layout
from kvpool.layouts.share import Share


@dataclass(frozen=True, slots=True)
class OwnExtents:
    """`numbers`: of the engine's extents in a chunk. Each has `payload_bytes` of the engine's, and the next one in the chunk
    begins `extent_bytes` behind it."""

    numbers: tuple[int, ...]
    payload_bytes: int
    extent_bytes: int

    @classmethod
    def of(cls, layout: Layout, share: Share) -> "OwnExtents":
        """Extents of a share of each chunk of a layout."""
        return cls(share.extents(layout), layout.payload_bytes, layout.extent_bytes)

    def __len__(self) -> int:
        return len(self.numbers)

    def start(self, own: int) -> int:
        """Where an extent begins in a chunk, in bytes."""
        return self.numbers[own] * self.extent_bytes

    def checksums(self, memory: kvpool_native.Mapping, start: int, count: int = 1) -> bytes:
        """CRC-32C of each of so many extents that lie one behind the other in a memory, u32."""
        return kvpool_native.extent_checksums(memory, start, self.extent_bytes, count)

    def fill(self, memory: kvpool_native.Mapping, start: int, count: int = 1) -> None:
        """Make zero what payloads leave of so many extents: it is part of their checksums."""
        if self.payload_bytes < self.extent_bytes:
            view = memory.view()
            for first in range(start, start + count * self.extent_bytes, self.extent_bytes):
                view[first + self.payload_bytes : first + self.extent_bytes] = 0

    def starts(self, chunks: npt.NDArray[np.uint64], own: int) -> npt.NDArray[np.uint64]:
        """Where an extent begins in chunks that begin there."""
        return chunks + np.uint64(self.start(own))
