"""A load onto a device without a daemon: chunks in an arena, their copies in a device's memory, and an engine there."""

from typing import Any

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.device.load import ArenaCheck, DeviceLoad
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.copying.device.sources import ArenaChunks, DeviceCopies, Sources
from tests.rigs.device.engine import DeviceKv
from tests.rigs.native_copies import Store

LAYOUT = kv.Layout(layers=5, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)
EXTENTS = OwnExtents.of(LAYOUT, kv.Share.whole(LAYOUT))
BLOCKS, CHUNKS = 40, 8
LONG_S = 60.0


class Loading:
    """See the module."""

    def __init__(self, device: kvpool_native.Device, seed: int) -> None:
        self.device = device
        self.store = Store(LAYOUT.chunk_bytes, LAYOUT.layers)
        dice = np.random.default_rng(seed)
        self.rows = dice.integers(0, 256, (CHUNKS, LAYOUT.chunk_bytes), dtype=np.uint8)
        self.offsets, self.slots, self.generations = self._stored(self.rows)
        self.tier = device.allocate(self.rows.nbytes)
        self._places = dice.permutation(CHUNKS)
        self._stream = device.stream()
        for row in range(CHUNKS):
            self.write_copy(row, self.rows[row])
        # The index has the words of the copies' slots too: here they are those of other chunks.
        _, self.copy_slots, self.copy_generations = self._stored(np.zeros_like(self.rows))
        self.engine = DeviceKv(LAYOUT, "kv_first", BLOCKS)
        self.cache = Cache(self.engine.arrays, LAYOUT, block_tokens=16, form="kv_first")
        self.ids = dice.permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
        self._threads = kvpool_native.CopyPool(1)

    def write_copy(self, row: int, values: Any) -> None:
        """Write other bytes where a chunk's copy is."""
        source = np.ascontiguousarray(values)
        self._stream.copy(
            *(np.uint64(word).tobytes() for word in (self.copy_address(row), source.ctypes.data, source.nbytes))
        )
        assert self._stream.record().wait(LONG_S)

    def copy_address(self, row: int) -> int:
        return int(self.tier.address) + int(self._places[row]) * LAYOUT.chunk_bytes

    def drop_copies(self, first: int) -> None:
        """The copies of this chunk and of those behind it go, and their room has other bytes."""
        self.store.drop(CHUNKS + first)
        for row in range(first, CHUNKS):
            self.write_copy(row, np.full(LAYOUT.chunk_bytes, 0xEE, np.uint8))

    def drop_chunks(self, first: int) -> None:
        """This chunk and those behind it leave the arena, and with it their copies; their room has other bytes."""
        self.store.drop(first)
        for offset in self.offsets[first:].tolist():
            self.store.bytes[offset : offset + LAYOUT.chunk_bytes] = 0xDD

    def corrupt(self, row: int, layer: int) -> None:
        """Flip a bit of a chunk in the arena."""
        self.store.bytes[int(self.offsets[row]) + layer * LAYOUT.layer_bytes + 5] ^= 1

    def load(self, with_copies: tuple[int, ...], *, is_set: bool = False) -> DeviceLoad:
        arena, index = self.store.arena, self.store.index
        chunks = ArenaChunks(arena, index, self.offsets, self.slots, self.generations)
        assert self.cache.side is not None
        blocks = DeviceBlocks(self.cache.side, PinnedBytes(arena, self.device))
        has_copy = np.isin(np.arange(CHUNKS), with_copies)
        addresses = np.array([self.copy_address(row) for row in range(CHUNKS)], np.uint64)
        copies = DeviceCopies(self.tier, addresses, self.copy_slots, np.where(has_copy, self.copy_generations, 0))
        sources = Sources(chunks, blocks.addresses(self.offsets), copies, EXTENTS)
        check = self._check(chunks, sources.from_arena(), is_set=is_set)
        return DeviceLoad(blocks, sources, check, EXTENTS, block_ids=self.ids, is_set=is_set)

    def loaded(self) -> list[bytes]:
        return self.engine.chunks(self.ids.tolist(), CHUNKS)

    def expected(self) -> list[bytes]:
        return [row.tobytes() for row in self.rows]

    def _check(self, chunks: ArenaChunks, chosen: Any, *, is_set: bool) -> ArenaCheck | None:
        some = chunks.of(chosen)
        if not len(some):
            return None
        columns = (some.offsets.tobytes(), some.slots.tobytes(), some.generations.tobytes())
        nothing = np.full(2 * len(some), -1, np.int64).tobytes()
        sizes = (LAYOUT.layers, LAYOUT.layer_bytes)
        view, index = self.cache.view, self.store.index
        job = self._threads.load(view, self.store.arena, index, *columns, nothing, *sizes, True, is_set=is_set)
        return ArenaCheck(job, chosen)

    def _stored(self, rows: Any) -> tuple[Any, Any, Any]:
        offsets = np.frombuffer(self.store.reserve(len(rows)), "<u8")
        for offset, row in zip(offsets.tolist(), rows, strict=True):
            self.store.bytes[offset : offset + len(row)] = row
        size, layers = LAYOUT.layer_bytes, LAYOUT.layers
        sums = [kvpool_native.extent_checksums(self.store.arena, offset, size, layers) for offset in offsets.tolist()]
        self.store.commit(b"".join(sums))
        slots, generations = np.frombuffer(self.store.slots, "<u8"), np.frombuffer(self.store.generations, "<u8")
        return offsets, slots, generations
