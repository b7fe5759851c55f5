"""Save of an engine whose KV is on a device: straight from its blocks into the reserved slots, layer by layer; with head groups
each group of a layer counts as one.

A layer is copied when it was announced and the device has done what the engine had queued until then; its checksum is computed
from the bytes in the slots, while the device copies the next one. Copies per byte: one, across the bus. A refusal of the driver
gives the save up.

Threads: the run's own, and any that waits. `_changed` guards all mutable state and is not held while bytes move.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_client.copying.device.blocks import DeviceBlocks, Event
from kvpool_client.copying.device.extents import OwnExtents

# One look for a cancelled save, while the engine computes what is announced.
MARK_SLICE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Queued:
    """A layer on its way into the slots."""

    layer: int
    starts: npt.NDArray[np.uint64]
    event: Event


class DeviceSave:
    """See the module. Has the methods of `save.SaveRun`."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        arena: kvpool_native.Mapping,
        extents: OwnExtents,
        *,
        offsets: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        self._blocks = blocks
        self._arena = arena
        self._extents = extents
        self._offsets = offsets
        self._block_ids = np.ascontiguousarray(block_ids).tobytes()
        self._changed = threading.Condition()
        self._announced: list[tuple[int, Event]] = []  # guarded by _changed
        self._copied = 0  # guarded by _changed
        self._checksums: dict[int, npt.NDArray[np.uint32]] = {}  # guarded by _changed; of a layer
        self._is_cancelled = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name="kvpool-device-save", daemon=True)
        self._thread.start()

    def announce(self, layer: int) -> bool:
        """Copy this layer from now on, after what the engine has queued so far; False if it was announced before."""
        return self._announce((layer,))

    def announce_all(self) -> None:
        """Copy every layer that was not announced."""
        with self._changed:
            known = {layer for layer, _ in self._announced}
        self._announce([layer for layer in range(len(self._extents)) if layer not in known])

    def wait(self, timeout_s: float) -> bool:
        """Whether everything announced was copied, or the save cancelled, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_cancelled or self._copied == len(self._announced), timeout_s)

    def cancel(self) -> None:
        """End the save; when it returns no byte of the slots is written any more."""
        self._give_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def is_cancelled(self) -> bool:
        """Whether the save was cancelled, or failed on the device."""
        with self._changed:
            return self._is_cancelled

    def progress(self) -> int:
        """Layers copied."""
        with self._changed:
            return self._copied

    def checksums(self) -> bytes:
        """CRC-32C of every layer of every chunk as it lies in its slot. Only after everything was copied."""
        return self.checksums_from(0)

    def copied_extents(self) -> int:
        """Extents copied, from the first one up to one that is not."""
        with self._changed:
            return next(layer for layer in count() if layer not in self._checksums)

    def checksums_from(self, layer: int) -> bytes:
        """CRC-32C of the extents from this one on that `copied_extents` counts, u32 [chunk][extent]."""
        end = self.copied_extents()
        with self._changed:
            rows = [self._checksums[number] for number in range(layer, end)]
        return np.stack(rows, axis=1).tobytes() if rows else b""

    def _announce(self, layers: Sequence[int]) -> bool:
        try:
            mark = self._blocks.after_engine()
        except RuntimeError:  # the device refuses: the save is given up, nothing is published
            self._give_up()
            return True
        with self._changed:
            known = {layer for layer, _ in self._announced}
            fresh = [layer for layer in layers if layer not in known]
            self._announced += [(layer, mark) for layer in fresh]
            self._changed.notify_all()
        return len(fresh) == len(layers)

    def _give_up(self) -> None:
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._copy()
        except RuntimeError:  # the device refuses: the save is given up, nothing is published
            self._blocks.end_saves()
            self._give_up()

    def _copy(self) -> None:
        ahead: _Queued | None = None
        for position in range(len(self._extents)):
            queued = ahead or self._begin(position, waits=True)
            if queued is None:
                return
            self._blocks.wait(queued.event)
            ahead = self._begin(position + 1, waits=False)
            checksums = self._checksums_of(queued.starts)
            with self._changed:
                self._checksums[queued.layer] = checksums
                self._copied += 1
                self._changed.notify_all()
        assert ahead is None

    def _begin(self, position: int, *, waits: bool) -> _Queued | None:
        """Queue the copy of the layer announced at this position; None where it cannot begin, or the save has ended."""
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._is_cancelled or len(self._announced) > position)
            if self._is_cancelled or len(self._announced) <= position:
                return None
            layer, mark = self._announced[position]
        while not mark.wait(MARK_SLICE_S if waits else 0.0):
            if not waits or self.is_cancelled():
                return None
        extents = self._extents
        starts = extents.starts(self._offsets, layer)
        event = self._blocks.queue_gather(layer, starts, self._block_ids, extents.payload_bytes)
        return _Queued(layer, starts, event)

    def _checksums_of(self, starts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """CRC-32C of one layer of every chunk, as it lies in its slot."""
        sums = []
        for start in starts.tolist():
            self._extents.fill(self._arena, start)
            sums.append(self._extents.checksums(self._arena, start))
        return np.frombuffer(b"".join(sums), "<u4")
