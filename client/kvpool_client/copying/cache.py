"""Cache: an engine's registered KV arrays, which it keeps alive, the native view of them, and their device's streams.

Immutable after `register`; any thread. Survives restarts of the daemon, because it does not depend on it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool_client.copying.buffers import PagedGeometry, contiguous_address, describe_layers
from kvpool_client.copying.device.blocks import DeviceBlocks, LayerLoads, LayerSaves
from kvpool_client.copying.device.driver import open_device, refusal
from kvpool_client.copying.device.host_blocks import HostBlocks
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.copying.device.side import DeviceSide
from kvpool_client.key_chain import Namespace, expected_one_dimension

SKIP_BLOCK = -1
# Up to so many ids a set of them is quicker than marking blocks (measured, numpy 2.4).
FEW_IDS = 32


class Cache:
    """An engine's registered KV: what `Pool.register` answers, and `Pool.load` and `Pool.save` take with block ids.

    It keeps the arrays alive and outlives a restart of the daemon; make one for each set of arrays, once. `block_tokens`,
    `blocks`, `form` and `device` are what was registered. Threads: any.
    """

    def __init__(
        self,
        layers: Sequence[object],
        layout: Layout,
        *,
        block_tokens: int,
        form: str,
        share: Share | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        """`share`: the part of each chunk that the arrays have; None: all of it. `namespace`: that of the Pool that
        registers them, whose model's KV they have; None: any Pool's of this layout.

        Raises InvalidArgument or LayoutMismatch, naming the layer and what was expected, or why the device cannot be used.
        The first cache of a process with runs of this length measures the copy variants, about 5 ms.
        """
        if fault := kvpool_native.copy_variant_fault():
            raise InvalidArgument(fault)
        self._layers = list(layers)
        self.layout = layout
        self.namespace = namespace
        self.share = share or Share.whole(layout)
        own = self.share.of_layout(layout)
        self.geometry: PagedGeometry = describe_layers(
            self._layers, own, block_tokens, form, has_head_groups=layout.head_groups > 1
        )
        self.view = _paged_view(self.geometry, self._layers)
        # Of tensors that can be given other memory: their storage, which is kept, and where it was.
        self._storages = [layer.untyped_storage() for layer in self._layers if hasattr(layer, "untyped_storage")]
        self._places = [
            (number, layer.data_ptr, layer.data_ptr())
            for number, layer in enumerate(self._layers)
            if hasattr(layer, "untyped_storage") and hasattr(layer, "data_ptr")
        ]
        self.side: DeviceSide | None = None  # None: the CPU reads and writes the arrays
        if self.device == "cpu":
            kvpool_native.tune_copies(self.geometry.plane_block_bytes // self.geometry.runs)
        elif self.geometry.runs > 1:
            raise LayoutMismatch(
                f"the arrays are on {self.device} and have the heads of a token together, expected each head group's bytes of "
                "a block in a row there"
            )
        else:
            self.side = _side_of(self.device, self.view, self._layers[0])

    def __repr__(self) -> str:
        return f"<Cache {self.blocks} blocks of {self.block_tokens} tokens, {self.form} on {self.device}>"

    @property
    def layers(self) -> Sequence[object]:
        """The registered arrays."""
        return self._layers

    @property
    def blocks(self) -> int:
        """Blocks in each layer."""
        return self.geometry.blocks

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.geometry.block_tokens

    @property
    def form(self) -> str:
        """kv_first | block_first | packed."""
        return self.geometry.form

    @property
    def device(self) -> str:
        """Where the arrays are: cpu, cuda:0, …"""
        return self.geometry.device

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks that a chunk covers."""
        return self.layout.chunk_tokens // self.block_tokens

    def layer_loads(self, memory: PinnedBytes) -> LayerLoads:
        """Copies of layers from host memory with chunks at offsets to this cache's blocks."""
        return self._blocks_beside(memory)

    def layer_saves(self, memory: PinnedBytes) -> LayerSaves:
        """Copies of layers from this cache's blocks to host memory with chunks at offsets."""
        return self._blocks_beside(memory)

    def _blocks_beside(self, memory: PinnedBytes) -> HostBlocks | DeviceBlocks:
        if self.side is None:
            return HostBlocks(self.geometry, memory, self._layers)
        return DeviceBlocks(self.side, memory)

    def engine_mark(self) -> Callable[[], None]:
        """A call that returns when everything is written that the calling thread's engine has queued so far."""
        return self.side.engine_mark() if self.side is not None else _nothing_queued

    def checked_block_ids(
        self, block_ids: object, chunks: int, *, may_skip: bool, may_repeat: bool = False
    ) -> npt.NDArray[np.int64]:
        """Block ids of `chunks` chunks as int64 [blocks], each block once, or as often as it comes where it `may_repeat`.
        `may_skip`: −1 stands for a block that is left out.
        Raises InvalidArgument for a wrong length, range or repetition, naming the first id that is wrong, and where a tensor
        has other memory than was registered."""
        for number, place, registered in self._places:
            if place() != registered:
                raise InvalidArgument(
                    f"layer {number} was registered at {registered:#x} and is at {place():#x} now, expected the same memory: "
                    "after resize_, set_, .data = and .to() register the tensors again"
                )
        ids = as_ids(block_ids)
        expected = chunks * self.blocks_per_chunk
        if len(ids) != expected:
            raise InvalidArgument(
                f"block_ids has {len(ids)} ids, expected {expected} for {chunks} chunks of {self.blocks_per_chunk} blocks"
            )
        lowest = SKIP_BLOCK if may_skip else 0
        named = np.unique(ids) if may_repeat else ids
        if len(ids) and not _are_apart(named, lowest, self.blocks):
            raise InvalidArgument(_wrong_id(ids, self.blocks, may_skip=may_skip, may_repeat=may_repeat))
        return ids


def _paged_view(geometry: PagedGeometry, owner: object) -> kvpool_native.CacheView:
    """The native view of paged KV; it keeps `owner`, the arrays, alive."""
    return kvpool_native.CacheView(
        bases=list(geometry.addresses),
        planes=geometry.planes,
        blocks=geometry.blocks,
        plane_block_bytes=geometry.plane_block_bytes,
        plane_stride=geometry.plane_stride,
        block_stride=geometry.block_stride,
        owner=owner,
        runs=geometry.runs,
        run_stride=geometry.run_stride,
    )


def _side_of(name: str, view: kvpool_native.CacheView, array: object) -> DeviceSide:
    device = open_device(name)
    try:
        return DeviceSide(device, view, array)
    except RuntimeError as error:
        raise InvalidArgument(refusal(f"the arrays are on {name}", error)) from error


def contiguous_view(
    array: object, layout: Layout, name: str, *, is_target: bool
) -> tuple[kvpool_native.CacheView, int]:
    """The native view of an array [chunks, chunk_bytes], one block for each chunk, and its number of chunks. `name`: the
    caller's word for it."""
    address, chunks = contiguous_address(array, layout, name, is_target=is_target)
    return _rows_view(array, address, chunks, extents=layout.kv_extents, extent_bytes=layout.payload_bytes), chunks


def addresses_view(addresses: npt.NDArray[np.int64], layout: Layout) -> kvpool_native.CacheView:
    """The native view of chunks at any addresses: a block's number is how far behind the lowest one it begins."""
    low = int(addresses.min()) if len(addresses) else 0
    return kvpool_native.CacheView(
        bases=[low + extent * layout.payload_bytes for extent in range(layout.kv_extents)],
        planes=1,
        blocks=int(addresses.max()) - low + 1 if len(addresses) else 0,
        plane_block_bytes=layout.payload_bytes,
        plane_stride=0,
        block_stride=1,
        owner=addresses,
    )


def extents_view(array: npt.NDArray[np.uint8], extent_bytes: int) -> kvpool_native.CacheView:
    """The native view of a C-contiguous array [chunks, extents of this size], one block for each chunk."""
    chunks, size = array.shape
    address = int(array.ctypes.data)
    return _rows_view(array, address, chunks, extents=size // extent_bytes, extent_bytes=extent_bytes)


def _rows_view(owner: object, address: int, chunks: int, *, extents: int, extent_bytes: int) -> kvpool_native.CacheView:
    return kvpool_native.CacheView(
        bases=[address + extent * extent_bytes for extent in range(extents)],
        planes=1,
        blocks=chunks,
        plane_block_bytes=extent_bytes,
        plane_stride=0,
        block_stride=extents * extent_bytes,
        owner=owner,
    )


def _nothing_queued() -> None:
    """The CPU has done everything when it returns."""


def _are_apart(ids: npt.NDArray[np.int64], lowest: int, blocks: int) -> bool:
    """Whether ids reach from `lowest` to the last of so many blocks, and none but −1 is there twice. In the time of two looks
    for the extremes: a few ids are a set, for many the blocks are marked."""
    if len(ids) <= FEW_IDS:
        few: list[int] = ids.tolist()
        named = set(few)
        again = max(0, few.count(SKIP_BLOCK) - 1)
        return lowest <= min(few) and max(few) < blocks and len(named) + again == len(few)
    low, high = int(ids.min()), int(ids.max())
    if low < lowest or high >= blocks:
        return False
    is_named = np.zeros(high + 2, np.bool_)
    is_named[ids] = True  # −1 is the last one
    skipped = np.count_nonzero(ids < 0) if low < 0 else 0
    return int(np.count_nonzero(is_named[:-1])) == len(ids) - skipped


def _wrong_id(ids: npt.NDArray[np.int64], blocks: int, *, may_skip: bool, may_repeat: bool) -> str:
    """What is wrong with the first id that is."""
    seen: dict[int, int] = {}
    for place, block in enumerate(ids.tolist()):
        if not 0 <= block < blocks and not (may_skip and block == SKIP_BLOCK):
            skipping = ", or −1 to leave the block out" if may_skip else ""
            return f"block_ids[{place}] is {block}, expected 0..{blocks - 1}{skipping}"
        if not may_repeat and seen.setdefault(block, place) != place and block != SKIP_BLOCK:
            return (
                f"block_ids[{seen[block]}] and block_ids[{place}] are both {block}, expected a block of its own for each "
                "block of tokens"
            )
    raise AssertionError("every id is right")


def as_ids(block_ids: object) -> npt.NDArray[np.int64]:
    """Block ids as a one-dimensional int64 array of its own: the engine may change its table while blocks are copied. Raises
    InvalidArgument on floats, shapes, or ids that do not fit."""
    try:
        ids = np.asarray(block_ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(f"block_ids is {type(block_ids).__name__}, expected integers: {error}") from error
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"block_ids has shape {ids.shape} of {ids.dtype}, {expected_one_dimension('block_ids', ids)}"
        )
    if ids.dtype == np.uint64 and int(ids.max()) > np.iinfo(np.int64).max:
        raise InvalidArgument(f"block_ids reach to {int(ids.max())}, expected the numbers of blocks")
    return np.array(ids, dtype=np.int64)
