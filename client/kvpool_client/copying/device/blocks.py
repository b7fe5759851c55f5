"""Device blocks: an engine's KV blocks on a device. Scatters layers of chunks to them and gathers layers back.

The same byte order as the native copies: a layer of a chunk is plane by plane, each plane's blocks in the chunk's order. A
layer of all chunks is one call, which queues its copies without the interpreter; nothing is allocated on the device. A chunk
may lie in host memory or in the device's own. Copies per byte: one. Methods run on the thread of one copy and raise
RuntimeError what the driver refuses; an event is recorded behind each layer.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.copying.device.side import DeviceSide

Event = kvpool_native.DeviceEvent
# A device that refuses so often has an error that stays, and has ended what it did; one may pass (no memory for an event).
END_TRIES = 8
# One look at copies that take longer; nothing depends on it.
WAIT_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Where each chunk begins, as an address, and the blocks that take it: i64 [chunk][block], −1 for one that is skipped."""

    addresses: npt.NDArray[np.uint64]
    block_ids: bytes

    @classmethod
    def of(cls, addresses: npt.NDArray[np.uint64], block_ids: npt.NDArray[np.int64]) -> "Spread":
        """Of as many blocks for each chunk."""
        return cls(addresses, np.ascontiguousarray(block_ids, dtype=np.int64).tobytes())


class LayerLoads(Protocol):
    """Copies of layers from chunks at offsets of host memory to the blocks of one cache. Events are None on the CPU, where
    everything is done at once."""

    def after_engine(self) -> Event | None:
        """An event after everything that the calling thread's engine has queued on the device so far."""
        ...

    def plan(self, offsets: Sequence[int], block_ids: npt.NDArray[np.int64]) -> Spread:
        """The chunks at `offsets` and their blocks, as many for each."""
        ...

    def queue_spread(self, layer: int, spread: Spread, layer_bytes: int, mark: Event | None) -> Event | None:
        """Queue the copy of `layer` of the planned chunks to their blocks, behind `mark`. Returns its event: after that the
        bytes are in the blocks."""
        ...


class LayerSaves(Protocol):
    """Copies of layers from the blocks of one cache to chunks at offsets of host memory. Events as of `LayerLoads`."""

    def after_engine(self) -> Event | None:
        """See `LayerLoads`."""
        ...

    def queue_gather(
        self,
        layer: int,
        starts: Sequence[int] | npt.NDArray[np.uint64],
        block_ids: bytes,
        layer_bytes: int,
        *,
        mark: Event | None = None,
    ) -> Event | None:
        """Queue the copy of `layer` of one chunk from its blocks to each of `starts` in host memory, behind `mark`. Returns its
        event: after that the bytes have arrived. `block_ids` as in `Spread`, none of them skipped."""
        ...

    def end_saves(self) -> None:
        """Wait for what is queued, after a refusal of the driver. Never raises."""
        ...


class DeviceBlocks:
    """One cache on one device, and host memory with chunks at offsets: the shared arena, or staging of the same form."""

    def __init__(self, side: DeviceSide, memory: PinnedBytes) -> None:
        self._side = side
        self._memory = memory  # outlives every copy

    def after_engine(self) -> Event:
        """See `LayerLoads`."""
        return self._side.after_engine()

    def addresses(self, offsets: Sequence[int] | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where the host memory has these offsets."""
        return np.asarray(offsets, dtype=np.uint64) + np.uint64(self._memory.address)

    def plan(self, offsets: Sequence[int], block_ids: npt.NDArray[np.int64]) -> Spread:
        """See `LayerLoads`."""
        return Spread.of(self.addresses(offsets), block_ids)

    def queue_spread(
        self, layer: int, spread: Spread, layer_bytes: int, mark: Event | None = None, *, start: int | None = None
    ) -> Event:
        """See `LayerLoads`; chunks may begin at addresses of the device, too. `start`: where in a chunk the layer begins; None:
        layers of `layer_bytes` lie one behind the other."""
        side, stream = self._side, self._side.load_stream
        sources = (spread.addresses + np.uint64(layer * layer_bytes if start is None else start)).tobytes()

        def queue() -> None:
            if mark is not None:
                stream.wait_for(mark)
            stream.scatter(side.view, layer, spread.block_ids, sources, layer_bytes)

        return _queued(stream, side.load_lock, queue)

    def queue_gather(
        self,
        layer: int,
        starts: Sequence[int] | npt.NDArray[np.uint64],
        block_ids: bytes,
        layer_bytes: int,
        *,
        mark: Event | None = None,
    ) -> Event:
        """See `LayerSaves`."""
        side, stream, targets = self._side, self._side.save_stream, self.addresses(starts).tobytes()

        def queue() -> None:
            if mark is not None:
                stream.wait_for(mark)
            stream.gather(side.view, layer, block_ids, targets, layer_bytes)

        return _queued(stream, side.save_lock, queue)

    def wait(self, event: Event) -> None:
        """Wait until everything queued before the event is done. A device that neither answers nor fails is waited for: what
        may still be copied must not be taken for ended."""
        while not event.wait(WAIT_SLICE_S):
            pass

    def end_loads(self) -> None:
        """Wait for what is queued to the engine's blocks, after a refusal of the driver. Never raises."""
        _end_copies(self._side.load_stream)

    def end_saves(self) -> None:
        """Wait for what is queued from the engine's blocks, after a refusal of the driver. Never raises."""
        _end_copies(self._side.save_stream)


def _queued(stream: kvpool_native.DeviceStream, lock: threading.Lock, queue: Callable[[], None]) -> Event:
    with lock:
        queue()
        return stream.record()


def _end_copies(stream: kvpool_native.DeviceStream) -> None:
    for _ in range(END_TRIES):
        with contextlib.suppress(RuntimeError):
            event = stream.record()
            while not event.wait(WAIT_SLICE_S):
                pass
            return
