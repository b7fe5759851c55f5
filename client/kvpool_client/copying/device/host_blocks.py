"""Host blocks: an engine's KV blocks in host memory, with the interface of device blocks, for an adapter that has one way for
both.

Copies are done when a call returns, on the calling thread. Copies per byte: one. Any thread.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_client.copying.buffers import PagedGeometry
from kvpool_client.copying.device.blocks import Event, Spread
from kvpool_client.copying.device.pinned_memory import PinnedBytes


class HostBlocks:
    """One cache in host memory, and memory with chunks at offsets. Has the methods of `LayerLoads` and `LayerSaves`; no
    block is skipped."""

    def __init__(self, geometry: PagedGeometry, memory: PinnedBytes, owner: object) -> None:
        """`owner` keeps the cache's arrays alive."""
        self._memory = memory
        self._views = [
            kvpool_native.CacheView(
                bases=[address],
                planes=geometry.planes,
                blocks=geometry.blocks,
                plane_block_bytes=geometry.plane_block_bytes,
                plane_stride=geometry.plane_stride,
                block_stride=geometry.block_stride,
                owner=owner,
                runs=geometry.runs,
                run_stride=geometry.run_stride,
            )
            for address in geometry.addresses
        ]

    def after_engine(self) -> None:
        """The CPU has done everything when it returns."""

    def plan(self, offsets: Sequence[int], block_ids: npt.NDArray[np.int64]) -> Spread:
        """See `LayerLoads`; addresses are offsets here."""
        return Spread.of(np.array(offsets, dtype=np.uint64), block_ids)

    def queue_spread(self, layer: int, spread: Spread, layer_bytes: int, mark: Event | None) -> None:
        """See `LayerLoads`."""
        del mark
        ids = np.frombuffer(spread.block_ids, np.int64).reshape(len(spread.addresses), -1)
        for row, offset in zip(ids, spread.addresses.tolist(), strict=True):
            start = offset + layer * layer_bytes
            extent = self._memory.bytes[start : start + layer_bytes]
            kvpool_native.scatter_plain(self._views[layer], row.tobytes(), len(row), extent)

    def queue_gather(
        self,
        layer: int,
        starts: Sequence[int] | npt.NDArray[np.uint64],
        block_ids: bytes,
        layer_bytes: int,
        *,
        mark: Event | None = None,
    ) -> None:
        """See `LayerSaves`."""
        del mark
        ids = np.frombuffer(block_ids, np.int64).reshape(len(starts), -1)
        for row, start in zip(ids, starts, strict=True):
            extent = self._memory.bytes[int(start) : int(start) + layer_bytes]
            kvpool_native.gather_plain(self._views[layer], row.tobytes(), len(row), extent)

    def end_saves(self) -> None:
        """See `LayerSaves`: nothing is queued."""
