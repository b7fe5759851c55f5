"""Device blocks: an engine's KV blocks on a device, addressed by torch. Scatters layers of chunks to them and gathers layers
back.

The same byte order as the native copies: a layer of a chunk is plane by plane, each plane's blocks in the chunk's order. Bytes
cross the bus into the device's staging ring plane by plane, so that each plane of a piece is one run of rows; nothing is
allocated on the device but block ids, once for a load. Methods run on the thread of one copy; work is queued on the
cache's stream, and an event is recorded after each layer (None on the CPU, where everything is done at once).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_client.copying.cache import SKIP_BLOCK
from kvpool_client.copying.device_arena import PinnedBytes
from kvpool_client.copying.device_side import DeviceSide


@dataclass(frozen=True, slots=True)
class Spread:
    """Chunks at `offsets` of host memory and the blocks that take them: `on_device` has the ids of all, `runs` those wanted."""

    offsets: tuple[int, ...]
    on_device: Any
    is_wanted: npt.NDArray[np.bool_]


class DeviceBlocks:
    """One cache on one device, and host memory with chunks at offsets: the shared arena, or staging of the same form."""

    def __init__(self, side: DeviceSide, arena: PinnedBytes) -> None:
        self._side = side
        self._arena = arena  # its memory outlives every copy

    def after_engine(self) -> Any:
        """An event after everything that the calling thread's engine has queued on the device so far."""
        return self._side.after_engine()

    def plan(self, offsets: list[int], block_ids: npt.NDArray[np.int64]) -> Spread:
        """The chunks at `offsets` and their blocks, as many for each; chunks of which every block is skipped are left out."""
        ids = block_ids.reshape(len(offsets), -1)
        wanted = np.flatnonzero((ids != SKIP_BLOCK).any(axis=1))
        chosen = np.ascontiguousarray(ids[wanted]).reshape(-1)
        with self._side.on_stream(self._side.load_stream, None):
            on_device = self._on_device(chosen)
        return Spread(tuple(offsets[number] for number in wanted), on_device, chosen != SKIP_BLOCK)

    def queue_spread(self, layer: int, spread: Spread, layer_bytes: int, mark: Any) -> Any:
        """Queue the copy of `layer` of the planned chunks from host to device. Returns its event; after `wait` on it the bytes
        are in the blocks."""
        side, stream = self._side, self._side.load_stream
        planes = side.planes[layer]
        plane_bytes = layer_bytes // len(planes)
        blocks = len(spread.is_wanted) // max(1, len(spread.offsets))
        with side.on_stream(stream, mark):
            for first, end in self._pieces(len(spread.offsets), layer_bytes):
                starts = [offset + layer * layer_bytes for offset in spread.offsets[first:end]]
                with side.ring.lock:
                    staged = side.ring.take((end - first) * layer_bytes, stream)
                    rows = staged.view(len(planes), end - first, plane_bytes)
                    staging, host = self._pairs(rows, starts, plane_bytes)
                    side.copy_each(staging, sources=host)
                    for plane, target in zip(rows, planes, strict=True):
                        source = plane.view(-1).view(side.item).view((end - first) * blocks, -1)
                        for low, high in _runs(spread.is_wanted[first * blocks : end * blocks]):
                            ids = spread.on_device[first * blocks + low : first * blocks + high]
                            target.index_copy_(0, ids, source[low:high])
                    side.ring.give_back(staged, stream, side.event_on(stream))
            return side.event_on(stream)

    def wait(self, event: Any) -> None:
        """Wait until everything queued before the event is done."""
        if event is not None:
            event.synchronize()

    def gather(
        self, layer: int, starts: list[int], block_ids: npt.NDArray[np.int64], *, layer_bytes: int, mark: Any
    ) -> None:
        """Device to host memory: `layer` of one chunk to each of `starts`. When it returns the bytes have arrived."""
        side, stream = self._side, self._side.save_stream
        planes = side.planes[layer]
        plane_bytes = layer_bytes // len(planes)
        blocks = len(block_ids) // len(starts)
        with side.on_stream(stream, mark):
            ids = self._on_device(block_ids)
            for first, end in self._pieces(len(starts), layer_bytes):
                with side.ring.lock:
                    staged = side.ring.take((end - first) * layer_bytes, stream)
                    rows = staged.view(len(planes), end - first, plane_bytes)
                    for plane, source in zip(rows, planes, strict=True):
                        target = plane.view(-1).view(side.item).view((end - first) * blocks, -1)
                        side.torch.index_select(source, 0, ids[first * blocks : end * blocks], out=target)
                    on_device, on_host = self._pairs(rows, starts[first:end], plane_bytes)
                    side.copy_each(on_host, sources=on_device)
                    side.ring.give_back(staged, stream, side.event_on(stream))
            event = side.event_on(stream)
        self.wait(event)

    def _on_device(self, ids: npt.NDArray[np.int64]) -> Any:
        return self._side.torch.from_numpy(np.ascontiguousarray(ids)).to(self._side.device)

    def _pieces(self, chunks: int, layer_bytes: int) -> Iterator[tuple[int, int]]:
        """Chunks from … to …, as many as a piece of the ring holds."""
        step = max(1, self._side.ring.piece_bytes // layer_bytes)
        for first in range(0, chunks, step):
            yield first, min(first + step, chunks)

    def _pairs(self, rows: Any, starts: list[int], plane_bytes: int) -> tuple[list[Any], list[Any]]:
        """Each plane of each chunk, in staging and in host memory."""
        memory, staged, host = self._arena.tensor, [], []
        for number, plane in enumerate(rows):
            for row, start in zip(plane, starts, strict=True):
                staged.append(row)
                host.append(memory[start + number * plane_bytes : start + (number + 1) * plane_bytes])
        return staged, host


def _runs(wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """From … to …, where all are wanted."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
