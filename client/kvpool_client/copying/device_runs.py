"""Loads and saves of an engine whose KV is on a device: one thread each, layer by layer, by `DeviceBlocks`.

For a load, the native threads first check each layer in the arena (generation and checksum, nothing written). The load then
queues the copies to the device's blocks, a few layers ahead, and reads the generations again when the device has the bytes:
only then is the layer in place. The check and the device read the arena one after the other: a client that overwrites another's
slot between the two is not detected, unless the daemon's write mode is `copy`. A save gathers a layer into the reserved slots
and computes its checksums from the bytes there.
Copies per byte: one across the bus into the device's staging ring, one on the device.

Threads: the run's own, and any that waits. `_changed` guards all mutable state and is not held while bytes move.
"""

import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.layout import Layout
from kvpool.types import LoadReason
from kvpool_client.copying.device_blocks import DeviceBlocks

CHECK_SLICE_S = 0.05
# Layers queued on the device ahead of the one that is waited for: enough to keep its copy engine busy (a guess).
LAYERS_AHEAD = 2


class DeviceLoad:
    """A load onto a device. Has the methods of `load.LoadRun`."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        check: kvpool_native.LoadJob,
        index: kvpool_native.IndexView,
        layout: Layout,
        *,
        offsets: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        """`check` is a native load of the same chunks that writes nothing. Begins at once."""
        self._blocks = blocks
        self._check = check
        self._index = index
        self._layout = layout
        self._offsets = list(offsets)
        self._slots = list(slots)
        self._generations = list(generations)
        self._block_ids = block_ids
        self._spread = blocks.plan(self._offsets, block_ids)
        self._planned = len(self._offsets)
        self._mark = blocks.after_engine()
        self._changed = threading.Condition()
        self._layers_done = 0  # guarded by _changed
        self._good = len(self._offsets)  # guarded by _changed
        self._reason = LoadReason.COMPLETE  # guarded by _changed
        self._is_cancelled = False  # guarded by _changed
        self._has_ended = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name="kvpool-device-load", daemon=True)
        self._thread.start()

    def wait_layer(self, layer: int, timeout_s: float) -> int:
        """1: in place, 0: the load ended before, -1: time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers_done > layer or self._has_ended, timeout_s)
            if self._layers_done > layer:
                return 1 if self._good else 0
            return 0 if self._has_ended else -1

    def wait(self, timeout_s: float) -> bool:
        """Whether the load has ended within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, timeout_s)

    def done(self) -> bool:
        """Whether the load has ended."""
        with self._changed:
            return self._has_ended

    def cancel(self) -> None:
        """End the load; when it has returned, nothing writes to the device."""
        with self._changed:
            self._is_cancelled = True
        self._check.cancel()
        self._thread.join()

    def chunks(self) -> int:
        """Leading chunks that have not failed; of an ended load, those of which every layer is in place."""
        with self._changed:
            return self._good if not self._has_ended or self._layers_done == self._layout.layers else 0

    def reason(self) -> int:
        """A `LoadReason` code."""
        with self._changed:
            return self._reason

    def progress(self) -> int:
        """Layers in place, and what the check has dealt with."""
        with self._changed:
            return self._layers_done + self._check.progress()

    def _run(self) -> None:
        queued: deque[tuple[int, int, Any]] = deque()
        try:
            for layer in range(self._layout.layers):
                count = self._checked(layer, queued)
                if not count:
                    break
                queued.append((layer, count, self._queue(layer, count)))
                if len(queued) > LAYERS_AHEAD:
                    self._settle(*queued.popleft())
            while queued:
                self._settle(*queued.popleft())
        except RuntimeError:  # the device refuses with an error of torch's: nothing was loaded
            with self._changed:
                self._good, self._reason = 0, LoadReason.IO
        with self._changed:
            if self._is_cancelled and self._layers_done < self._layout.layers:
                self._reason = LoadReason.CANCELLED
            self._has_ended = True
            self._changed.notify_all()

    def _checked(self, layer: int, queued: "deque[tuple[int, int, Any]]") -> int:
        """How many chunks have a good layer in the arena; settles what is queued while it is waited for. 0 ends the load."""
        code = self._check.wait_layer(layer, 0.0)
        while code == -1:
            if queued:
                self._settle(*queued.popleft())
            code = self._check.wait_layer(layer, 0.0 if queued else CHECK_SLICE_S)
        self._limit(self._check.chunks() if code == 1 else 0, LoadReason(self._check.reason()))
        with self._changed:
            return 0 if self._is_cancelled else self._good

    def _queue(self, layer: int, count: int) -> Any:
        if count != self._planned:  # some chunks have failed since
            ids = self._block_ids[: count * (len(self._block_ids) // len(self._offsets))]
            self._spread, self._planned = self._blocks.plan(self._offsets[:count], ids), count
        return self._blocks.queue_spread(layer, self._spread, self._layout.layer_bytes, self._mark)

    def _settle(self, layer: int, count: int, event: Any) -> None:
        """The device has the layer's bytes: those of slots that still stand are in place."""
        self._blocks.wait(event)
        self._limit(self._standing(count), LoadReason.GONE)
        with self._changed:
            self._layers_done = layer + 1
            self._changed.notify_all()

    def _standing(self, count: int) -> int:
        """Leading chunks whose slots were not given away while the device read them."""
        for number in range(count):
            if self._index.generation_at(self._slots[number]) != self._generations[number]:
                return number
        return count

    def _limit(self, count: int, reason: LoadReason) -> None:
        with self._changed:
            if count < self._good:
                self._good, self._reason = count, reason


class DeviceSave:
    """A save from a device. Has the methods of `save.SaveRun`."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        arena: kvpool_native.Mapping,
        layout: Layout,
        *,
        offsets: Sequence[int],
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        self._blocks = blocks
        self._arena = arena
        self._layout = layout
        self._offsets = list(offsets)
        self._block_ids = block_ids
        self._changed = threading.Condition()
        self._announced: list[tuple[int, object]] = []  # guarded by _changed
        self._copied = 0  # guarded by _changed
        self._checksums: dict[int, npt.NDArray[np.uint32]] = {}  # guarded by _changed; of a layer
        self._is_cancelled = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name="kvpool-device-save", daemon=True)
        self._thread.start()

    def announce(self, layer: int) -> bool:
        """Copy this layer from now on, after what the engine has queued so far; False if it was announced before."""
        mark = self._blocks.after_engine()
        with self._changed:
            if any(layer == known for known, _ in self._announced):
                return False
            self._announced.append((layer, mark))
            self._changed.notify_all()
        return True

    def announce_all(self) -> None:
        """Copy every layer that was not announced."""
        for layer in range(self._layout.layers):
            self.announce(layer)

    def wait(self, timeout_s: float) -> bool:
        """Whether everything announced was copied, or the save cancelled, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_cancelled or self._copied == len(self._announced), timeout_s)

    def cancel(self) -> None:
        """End the save; when it returns no byte of the slots is written any more."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
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

    def copied_layers(self) -> int:
        """Layers copied, from the first one up to one that is not."""
        with self._changed:
            return next(layer for layer in count() if layer not in self._checksums)

    def checksums_from(self, layer: int) -> bytes:
        """CRC-32C of the layers from this one on that `copied_layers` counts, u32 [chunk][layer]."""
        end = self.copied_layers()
        with self._changed:
            rows = [self._checksums[number] for number in range(layer, end)]
        return np.stack(rows, axis=1).tobytes() if rows else b""

    def _checksums_of(self, starts: list[int]) -> npt.NDArray[np.uint32]:
        """CRC-32C of one layer of every chunk, as it lies in its slot."""
        size = self._layout.layer_bytes
        sums = b"".join(kvpool_native.extent_checksums(self._arena, start, size, 1) for start in starts)
        return np.frombuffer(sums, "<u4")

    def _run(self) -> None:
        for position in range(self._layout.layers):
            with self._changed:
                self._changed.wait_for(lambda: self._is_cancelled or len(self._announced) > self._copied)
                if self._is_cancelled:
                    return
                layer, mark = self._announced[position]
            try:
                starts = [offset + layer * self._layout.layer_bytes for offset in self._offsets]
                size = self._layout.layer_bytes
                self._blocks.gather(layer, starts, self._block_ids, layer_bytes=size, mark=mark)
                checksums = self._checksums_of(starts)
            except RuntimeError:  # the device refuses: the save is given up, nothing is published
                self.cancel()
                return
            with self._changed:
                self._checksums[layer] = checksums
                self._copied += 1
                self._changed.notify_all()
