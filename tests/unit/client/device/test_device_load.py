"""Loads onto a device out of the arena and out of copies in the device's own memory, without a daemon."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.types import LoadReason
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.driver import open_device
from kvpool_client.copying.device.extents import OwnExtents
from kvpool_client.copying.device.load import ArenaCheck, DeviceLoad
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from kvpool_client.copying.device.sources import ArenaChunks, DeviceCopies, Sources
from tests.rigs.device import emulated
from tests.rigs.device.engine import DeviceKv, use_emulated_driver
from tests.rigs.native_copies import Store

LAYOUT = kv.Layout(layers=5, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)
EXTENTS = OwnExtents.of(LAYOUT, kv.Share.whole(LAYOUT))
BLOCKS, CHUNKS = 40, 8
LONG_S = 20.0


class Loading:
    """Chunks in an arena, their copies in a device's memory, and an engine there."""

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

    def corrupt(self, row: int, layer: int) -> None:
        """Flip a bit of a chunk in the arena."""
        self.store.bytes[int(self.offsets[row]) + layer * LAYOUT.layer_bytes + 5] ^= 1

    def load(self, with_copies: tuple[int, ...]) -> DeviceLoad:
        arena, index = self.store.arena, self.store.index
        chunks = ArenaChunks(arena, index, self.offsets, self.slots, self.generations)
        assert self.cache.side is not None
        blocks = DeviceBlocks(self.cache.side, PinnedBytes(arena, self.device))
        has_copy = np.isin(np.arange(CHUNKS), with_copies)
        addresses = np.array([self.copy_address(row) for row in range(CHUNKS)], np.uint64)
        copies = DeviceCopies(self.tier, addresses, self.copy_slots, np.where(has_copy, self.copy_generations, 0))
        sources = Sources(chunks, blocks.addresses(self.offsets), copies, EXTENTS)
        return DeviceLoad(blocks, sources, self._check(chunks, sources.from_arena()), EXTENTS, block_ids=self.ids)

    def loaded(self) -> list[bytes]:
        return self.engine.chunks(self.ids.tolist(), CHUNKS)

    def expected(self) -> list[bytes]:
        return [row.tobytes() for row in self.rows]

    def _check(self, chunks: ArenaChunks, chosen: Any) -> ArenaCheck | None:
        some = chunks.of(chosen)
        if not len(some):
            return None
        columns = (some.offsets.tobytes(), some.slots.tobytes(), some.generations.tobytes())
        nothing = np.full(2 * len(some), -1, np.int64).tobytes()
        sizes = (LAYOUT.layers, LAYOUT.layer_bytes)
        view, index = self.cache.view, self.store.index
        job = self._threads.load(view, self.store.arena, index, *columns, nothing, *sizes, True)
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvpool_native.Device]:
    use_emulated_driver(monkeypatch)
    yield open_device("cuda:0")
    emulated.order("clear 1")


@pytest.mark.parametrize("with_copies", [(), (0, 3, 5), tuple(range(CHUNKS))])
def test_chunks_come_from_the_arena_and_from_copies(
    device: kvpool_native.Device, with_copies: tuple[int, ...], seed: int
) -> None:
    loading = Loading(device, seed)
    for row in with_copies:  # its bytes in the arena are not looked at
        loading.corrupt(row, 2)
    load = loading.load(with_copies)
    assert [load.wait_layer(layer, LONG_S) for layer in range(5)] == [1] * 5
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (CHUNKS, LoadReason.COMPLETE)
    assert loading.loaded() == loading.expected()


def test_a_corrupt_chunk_of_the_arena_shortens_the_load(device: kvpool_native.Device, seed: int) -> None:
    loading = Loading(device, seed)
    loading.corrupt(4, 3)
    load = loading.load((0, 1, 5, 6))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (4, LoadReason.CHECKSUM)
    assert loading.loaded()[:4] == loading.expected()[:4]


def test_copies_that_have_gone_before_the_load_are_replaced_from_the_arena(
    device: kvpool_native.Device, seed: int
) -> None:
    loading = Loading(device, seed)
    loading.drop_copies(2)
    load = loading.load(tuple(range(CHUNKS)))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (CHUNKS, LoadReason.COMPLETE)
    assert loading.loaded() == loading.expected()


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_a_copy_that_goes_during_the_load_is_replaced_from_layer_0_on(
    device: kvpool_native.Device, monkeypatch: pytest.MonkeyPatch, layer: int, seed: int
) -> None:
    """It goes while the device copies one of the layers; it has never been the chunk's, so no layer of it may stay."""
    loading, settled = Loading(device, seed), iter(range(100))
    loading.write_copy(3, np.full(LAYOUT.chunk_bytes, 0x77, np.uint8))
    wait_for = DeviceBlocks.wait

    def waited(self: DeviceBlocks, event: kvpool_native.DeviceEvent) -> None:
        if next(settled) == layer:
            loading.drop_copies(3)
        wait_for(self, event)

    monkeypatch.setattr(DeviceBlocks, "wait", waited)
    load = loading.load((0, 1, 3, 4, 7))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (CHUNKS, LoadReason.COMPLETE)
    assert loading.loaded() == loading.expected()


@pytest.mark.parametrize(("corrupt_layer", "reason"), [(0, LoadReason.CHECKSUM), (4, LoadReason.CHECKSUM)])
def test_a_copy_that_goes_leaves_a_chunk_of_the_arena_that_is_checked(
    device: kvpool_native.Device, corrupt_layer: int, reason: LoadReason, seed: int
) -> None:
    loading = Loading(device, seed)
    loading.corrupt(5, corrupt_layer)
    loading.drop_copies(5)
    load = loading.load(tuple(range(CHUNKS)))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (5, reason)
    assert loading.loaded()[:5] == loading.expected()[:5]


def test_a_chunk_that_has_left_the_arena_is_gone_whatever_its_copy_is(device: kvpool_native.Device, seed: int) -> None:
    loading = Loading(device, seed)
    loading.store.drop(6)
    load = loading.load(tuple(range(CHUNKS)))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) == (6, LoadReason.GONE)


def test_a_load_that_is_cancelled_counts_no_layer_of_a_lost_copy(
    device: kvpool_native.Device, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    loading = Loading(device, seed)
    loading.drop_copies(0)
    load: list[DeviceLoad] = []
    wait_for = DeviceBlocks.wait

    def waited(self: DeviceBlocks, event: kvpool_native.DeviceEvent) -> None:
        with load[0]._changed:
            load[0]._is_cancelled = True
        wait_for(self, event)

    monkeypatch.setattr(DeviceBlocks, "wait", waited)
    emulated.order("hang 1")
    load.append(loading.load(tuple(range(CHUNKS))))
    emulated.order("hang 0")
    assert load[0].wait(LONG_S)
    assert (load[0].chunks(), load[0].reason(), load[0].wait_layer(0, 0.0)) == (0, LoadReason.CANCELLED, 0)


@pytest.mark.parametrize("number", range(1, 12, 2))
@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventQuery"])
def test_an_error_of_the_driver_ends_the_load_with_reason_io(
    device: kvpool_native.Device, name: str, number: int, seed: int
) -> None:
    loading = Loading(device, seed)
    loading.drop_copies(4)
    emulated.order(f"fail {name} {number} 999")
    load = loading.load((1, 2, 4, 5))
    assert load.wait(LONG_S)
    assert (load.chunks(), load.reason()) in ((CHUNKS, LoadReason.COMPLETE), (0, LoadReason.IO))
    emulated.order("clear 1")
    seen = loading.loaded()
    assert load.reason() == LoadReason.IO or seen == loading.expected()
    load.cancel()
    assert loading.loaded() == seen


@pytest.mark.parametrize(
    "faults", ["fail cuEventQuery 3 719\nfail cuEventRecord 4 719\nfail cuEventRecord 5 719", "fail cuEventQuery 3 719"]
)
def test_errors_that_pass_end_no_load_before_its_copies(device: kvpool_native.Device, faults: str, seed: int) -> None:
    loading = Loading(device, seed)
    emulated.order(f"delay_us 15000\n{faults}\nfail cuEventQuery 4 719")
    load = loading.load(tuple(range(CHUNKS)))
    assert load.wait(LONG_S)
    assert load.reason() == LoadReason.IO
    emulated.order("clear 1\ndelay_us 0")
    seen = loading.loaded()
    assert loading.cache.side is not None
    assert loading.cache.side.load_stream.record().wait(LONG_S)
    assert loading.loaded() == seen, "nothing was written after the load's end"
