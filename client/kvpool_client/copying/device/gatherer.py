"""Filling a window of staging memory with layers of chunks from a device: by the device's own copies.

The checksums are of the bytes in the window. Copies per byte: one, across the bus. Any thread announces; one piece's methods on
one thread.
"""

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_client.copying.device.blocks import DeviceBlocks, Event
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.gather import Gathering, Piece, window_column


class DeviceGatherer:
    """Engine memory on a device: each layer crosses the bus into the window, and is checksummed there."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        staging: kvpool_native.Mapping,
        *,
        extents: OwnExtents,
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        """`block_ids`: [chunk][block]."""
        self._blocks = blocks
        self._staging = staging
        self._extents = extents
        self._block_ids = block_ids
        self._marks: dict[int, Event | None] = {}  # each is written before its layer is announced to the save's thread

    def announce(self, layer: int) -> None:
        """Remember what the engine has queued so far."""
        try:
            self._marks[layer] = self._blocks.after_engine()
        except RuntimeError:  # the device refuses: the piece with this layer will be given up
            self._marks[layer] = None

    def begin_piece(self, piece: Piece, offset: int) -> Gathering:
        """Start on a piece, into the window at `offset`, once the device has done what the engine had queued."""
        ids = np.ascontiguousarray(self._block_ids[piece.first_chunk : piece.first_chunk + piece.chunks]).tobytes()
        marks = [self._marks[piece.first_layer + number] for number in range(piece.layers)]
        starts = window_column(offset, piece, self._extents.extent_bytes)
        return _DeviceGathering(
            self._blocks, self._staging, piece, marks, starts=starts, block_ids=ids, extents=self._extents
        )


class _DeviceGathering:
    """A piece on its way from a device. Has the methods of `Gathering`.

    WAITING for the engine ──its marks passed──► QUEUED ──event──► GATHERED
        └──the device refuses, cancel──► CANCELLED, nothing is copied any more
    """

    def __init__(
        self,
        blocks: DeviceBlocks,
        staging: kvpool_native.Mapping,
        piece: Piece,
        marks: "list[Event | None]",
        *,
        starts: npt.NDArray[np.uint64],
        block_ids: bytes,
        extents: OwnExtents,
    ) -> None:
        self._blocks = blocks
        self._staging = staging
        self._piece = piece
        self._marks = marks
        self._starts = starts
        self._block_ids = block_ids
        self._extents = extents
        self._event: Event | None = None
        self._is_gathered = self._is_cancelled = False
        self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time; queues the copies as soon as they may begin."""
        if self._is_gathered or self._is_cancelled:
            return True
        try:
            if self._event is None and self._is_engine_done(timeout_s):
                self._event = self._queue()
            if self._event is not None and self._event.wait(timeout_s):
                self._fill()  # before the daemon copies: the window may have held extents of other payloads
                self._is_gathered = True
        except RuntimeError:  # the device refuses: the save is given up, nothing is published
            self._blocks.end_saves()
            self._is_cancelled = True
        return self._is_gathered or self._is_cancelled

    def is_cancelled(self) -> bool:
        """Whether the device refused, or it was cancelled."""
        return self._is_cancelled

    def progress(self) -> int:
        """Extents in the window: all at once."""
        return self._piece.extents if self._is_gathered else 0

    def cancel(self) -> None:
        """End it; waits for copies that are queued."""
        if self._event is not None and not self._is_gathered and not self._is_cancelled:
            self._blocks.end_saves()
        self._is_cancelled = self._is_cancelled or not self._is_gathered

    def checksums(self) -> bytes:
        """CRC-32C of the bytes in the window."""
        assert self._is_gathered
        starts = self._starts.tolist()
        return b"".join(self._extents.checksums(self._staging, start, self._piece.layers) for start in starts)

    def _fill(self) -> None:
        for start in self._starts.tolist():
            self._extents.fill(self._staging, start, self._piece.layers)

    def _is_engine_done(self, timeout_s: float) -> bool:
        while self._marks:
            mark = self._marks[-1]
            if mark is None:
                raise RuntimeError("the engine's work could not be marked")
            if not mark.wait(timeout_s):
                return False
            self._marks.pop()
        return True

    def _queue(self) -> Event:
        extents, first = self._extents, self._piece.first_layer
        for number in range(self._piece.layers):
            starts = self._starts + np.uint64(number * extents.extent_bytes)
            event = self._blocks.queue_gather(first + number, starts, self._block_ids, extents.payload_bytes)
        return event
