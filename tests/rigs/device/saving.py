"""A save from a device without a daemon: an engine with random KV there, and memory with a slot for each chunk."""

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device import save as device_save
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from tests.rigs.device.engine import DeviceKv, EngineStream

LONG_S = 60.0
BLOCKS, CHUNKS = 64, 24


class Saving:
    """See the module."""

    def __init__(self, device: kvpool_native.Device, form: str, seed: int, stream: EngineStream | None = None) -> None:
        planes = 1 if form == "mla" else 2
        self.layout = kv.Layout(
            layers=3,
            kv_heads=2,
            head_dim=16,
            dtype="bfloat16",
            chunk_tokens=32,
            planes=planes,
            format="mine" if form == "packed" else "",
            block_tokens=16 if form == "packed" else None,
        )
        self.engine = DeviceKv(self.layout, form, BLOCKS, stream=stream)
        self.cache = Cache(self.engine.arrays, self.layout, block_tokens=16, form=self.engine.register_form)
        self.layers = self.engine.random_layers(seed)
        self.memory = kvpool_native.Mapping.create("slots", CHUNKS * self.layout.chunk_bytes)
        dice = np.random.default_rng(seed)
        self.offsets = (dice.permutation(CHUNKS) * self.layout.chunk_bytes).astype(np.uint64)
        self.ids = dice.permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
        assert self.cache.side is not None
        self.extents = OwnExtents.of(self.layout, kv.Share.whole(self.layout))
        self.blocks = DeviceBlocks(self.cache.side, PinnedBytes(self.memory, device))

    def save(self) -> device_save.DeviceSave:
        return device_save.DeviceSave(self.blocks, self.memory, self.extents, offsets=self.offsets, block_ids=self.ids)

    def expected(self) -> list[bytes]:
        rows = self.ids.reshape(CHUNKS, 2).tolist()
        return [self.engine.chunk(self.layers, row) for row in rows]

    def stored(self) -> list[bytes]:
        view, size = self.memory.view(), self.layout.chunk_bytes
        return [view[int(offset) : int(offset) + size].tobytes() for offset in self.offsets]

    def checksums(self) -> bytes:
        size, layers = self.layout.layer_bytes, self.layout.layers
        return b"".join(kvpool_native.extent_checksums(self.memory, int(at), size, layers) for at in self.offsets)
