"""Blocks of an engine's KV on a device, addressed by torch: spread a layer's extents over them, gather them back.

The same byte order as the native copies: a layer of a chunk is plane by plane, each plane's blocks in the chunk's order.
torch is imported when the first such cache is used, never before. Methods run on the thread of one copy; work is queued on
a side stream of the device, and an event stands behind each layer (None on the CPU, where everything is done at once).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool_client.cache import SKIP_BLOCK, Cache
from kvpool_client.device_arena import PinnedBytes

if TYPE_CHECKING:
    import torch


class DeviceBlocks:
    """One registered cache on one device. Immutable; one copy at a time."""

    def __init__(self, cache: Cache, arena: PinnedBytes) -> None:
        """`arena` is host memory with chunks at offsets: the shared arena, or staging of the same form."""
        import torch  # optional heavy dependency: an engine with tensors on a device has it loaded

        self._torch: Any = torch  # its stream and event calls are untyped
        self._cache = cache
        self._device = self._torch.device(cache.device)
        self._arena = arena  # its memory outlives every copy
        self._layers = [_as_bytes(self._torch, layer) for layer in cache.layers]
        self._stream: Any = self._torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def after_engine(self) -> Any:
        """A mark behind everything that the calling thread's engine has queued on the device so far."""
        if self._stream is None:
            return None
        mark = self._torch.cuda.Event()
        mark.record(self._torch.cuda.current_stream(self._device))
        return mark

    def queue_spread(
        self, layer: int, offsets: list[int], layer_bytes: int, block_ids: npt.NDArray[np.int64], mark: Any
    ) -> Any:
        """Arena to device: `layer` of the chunks at `offsets`. The event behind it: `wait` has the bytes in the blocks."""
        with self._on_stream(mark):
            staged = self._torch.empty((len(offsets), layer_bytes), dtype=self._torch.uint8, device=self._device)
            for row, offset in enumerate(offsets):
                start = offset + layer * layer_bytes
                staged[row].copy_(self._arena.tensor[start : start + layer_bytes], non_blocking=True)
            wanted = np.flatnonzero(block_ids != SKIP_BLOCK)
            ids = self._torch.from_numpy(block_ids[wanted]).to(self._device)
            rows = self._torch.from_numpy(wanted).to(self._device)
            for plane, blocks in enumerate(self._planes(layer)):
                blocks.index_copy_(0, ids, self._plane_of(staged, plane, blocks).index_select(0, rows))
            return self._event()

    def wait(self, event: Any) -> None:
        """Until what was queued before the event is done."""
        if event is not None:
            event.synchronize()

    def gather(
        self, layer: int, starts: list[int], layer_bytes: int, block_ids: npt.NDArray[np.int64], mark: Any
    ) -> None:
        """Device to host memory: `layer` of one chunk to each of `starts`. When it returns the bytes have arrived."""
        with self._on_stream(mark):
            ids = self._torch.from_numpy(block_ids).to(self._device)
            parts = [blocks.index_select(0, ids).reshape(len(starts), -1) for blocks in self._planes(layer)]
            staged = self._torch.cat(parts, dim=1)
            for row, start in enumerate(starts):
                self._arena.tensor[start : start + layer_bytes].copy_(staged[row], non_blocking=True)
            event = self._event()
        self.wait(event)

    def _planes(self, layer: int) -> "list[torch.Tensor]":
        """The layer's planes, each `[blocks, …]`."""
        geometry, whole = self._cache.geometry, self._layers[layer]
        if geometry.planes == 1:
            return [whole]
        axis = 0 if geometry.form == "kv_first" else 1
        return [whole.select(axis, plane) for plane in range(geometry.planes)]

    def _plane_of(self, staged: "torch.Tensor", plane: int, blocks: "torch.Tensor") -> "torch.Tensor":
        """One plane of every staged chunk, block by block, in the shape of `blocks`."""
        by_plane = staged.view(len(staged), self._cache.geometry.planes, -1)[:, plane]
        return by_plane.reshape(-1, *blocks.shape[1:])

    def _on_stream(self, mark: Any) -> Any:
        if self._stream is None:
            return self._torch.no_grad()
        if mark is not None:
            self._stream.wait_event(mark)
        return self._torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        if self._stream is None:
            return None
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event


def _as_bytes(torch_module: Any, layer: Any) -> "torch.Tensor":
    """The tensor's bytes without copying; the last axis grows by the item's size."""
    viewed: torch.Tensor = layer.detach().view(torch_module.uint8)
    return viewed
