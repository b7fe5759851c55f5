"""Filling a window of staging memory with layers of chunks, by the native threads; a device's copies are in `device/gatherer`.

A piece of a save is some layers of some chunks; in the window they lie chunk by chunk, layer by layer. Copies per byte: one.
Any thread; one piece's methods on one thread.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.layout import Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """`layers` layers from `first_layer` on, of `chunks` chunks from `first_chunk` on."""

    first_chunk: int
    chunks: int
    first_layer: int
    layers: int

    @property
    def extents(self) -> int:
        """Layers of chunks."""
        return self.chunks * self.layers


class Gathering(Protocol):
    """A piece being gathered into a window: a native save job, or copies of a device."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        ...

    def is_cancelled(self) -> bool:
        """Whether it ended without all its bytes."""
        ...

    def progress(self) -> int:
        """Extents in the window so far."""
        ...

    def cancel(self) -> None:
        """End it; when it has returned, it neither writes the window nor reads engine memory."""
        ...

    def checksums(self) -> bytes:
        """CRC-32C of the bytes in the window, u32 [chunk][layer]. Only after everything was gathered."""
        ...


class Gatherer(Protocol):
    """The engine memory of one save."""

    def announce(self, layer: int) -> None:
        """The layer's bytes may be read, after what the engine has queued so far."""
        ...

    def begin_piece(self, piece: Piece, offset: int) -> Gathering:
        """Start on a piece, into the window at `offset`."""
        ...


class HostGatherer:
    """Engine memory that the CPU reads: the native threads do the work."""

    def __init__(
        self,
        threads: kvpool_native.CopyPool,
        view: kvpool_native.CacheView,
        staging: kvpool_native.Mapping,
        *,
        layout: Layout,
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        """`block_ids`: [chunk][block]."""
        self._threads = threads
        self._view = view
        self._staging = staging
        self._layout = layout
        self._block_ids = block_ids

    def announce(self, layer: int) -> None:
        """Nothing to do: the CPU sees what the engine has written."""

    def begin_piece(self, piece: Piece, offset: int) -> Gathering:
        """Start on a piece, into the window at `offset`."""
        ids = self._block_ids[piece.first_chunk : piece.first_chunk + piece.chunks]
        job = self._threads.save(
            self._view,
            self._staging,
            window_column(offset, piece, self._layout.extent_bytes).tobytes(),
            np.ascontiguousarray(ids).tobytes(),
            piece.layers,
            self._layout.payload_bytes,
            piece.first_layer,
            extent_bytes=self._layout.extent_bytes,
        )
        job.announce_all()
        return job


def window_column(offset: int, piece: Piece, extent_bytes: int) -> npt.NDArray[np.uint64]:
    """Where each chunk's layers begin in the window, u64."""
    return np.uint64(offset) + np.arange(piece.chunks, dtype="<u8") * np.uint64(piece.layers * extent_bytes)
