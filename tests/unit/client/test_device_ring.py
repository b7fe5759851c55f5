"""A device's staging ring: bounded, made once, and safe between streams; with torch on the CPU as the device."""

import threading
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kvpool_client.copying import device_ring, device_runs  # noqa: E402
from kvpool_client.copying.cache import Cache  # noqa: E402
from kvpool_client.copying.copies import Copies  # noqa: E402
from kvpool_client.copying.device_arena import PinnedBytes  # noqa: E402
from kvpool_client.copying.device_blocks import DeviceBlocks  # noqa: E402
from kvpool_client.copying.device_ring import StagingRing  # noqa: E402
from kvpool_client.copying.device_side import DeviceSide  # noqa: E402

pytestmark = pytest.mark.torch

BLOCKS = 64
CHUNKS = 24


class Allocations(TorchDispatchMode):
    """Bytes that operations of this thread allocate, and how often each was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.bytes = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] = self.calls.get(func.overloadpacket.__name__, 0) + 1
        known = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        known_at = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        for leaf in _tensors(answer):
            storage = leaf.untyped_storage()
            if id(storage) not in known and storage.data_ptr() not in known_at:
                self.bytes += storage.nbytes()
        return answer


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _layout(planes: int) -> kv.Layout:
    return kv.Layout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32, planes=planes)


def _cache(form: str, width: int = 16) -> Cache:
    axes = {"kv_first": (2, BLOCKS), "block_first": (BLOCKS, 2), "mla": (BLOCKS,)}[form]
    layers = [torch.zeros((*axes, 16, 2, width), dtype=torch.bfloat16) for _ in range(2)]
    return Cache(layers, _layout(1 if form == "mla" else 2), block_tokens=16, form="auto" if form == "mla" else form)


def _memory(layout: kv.Layout, seed: int) -> tuple[PinnedBytes, list[int]]:
    """Host memory with chunks in no order, and where each begins."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, (CHUNKS, layout.chunk_bytes), dtype=np.uint8)
    return PinnedBytes(memory.reshape(-1), "cpu"), [int(row) * layout.chunk_bytes for row in rng.permutation(CHUNKS)]


@pytest.mark.parametrize("form", ["kv_first", "block_first", "mla"])
@pytest.mark.parametrize("ring_bytes", [1 << 12, 3 << 13, 64 << 20])
def test_bytes_survive_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, form: str, ring_bytes: int, seed: int
) -> None:
    monkeypatch.setattr(device_ring, "RING_BYTES", ring_bytes)
    cache = _cache(form)
    layout = cache.layout
    blocks = DeviceBlocks(DeviceSide(cache, StagingRing(torch, "cpu", layout.layer_bytes)), _memory(layout, seed)[0])
    offsets = [number * layout.chunk_bytes for number in range(CHUNKS)]
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
    spread = blocks.plan(offsets, ids)
    back, _ = _memory(layout, seed + 1)
    other = DeviceBlocks(blocks._side, back)
    for layer in range(layout.layers):
        blocks.queue_spread(layer, spread, layout.layer_bytes, None)
        starts = [offset + layer * layout.layer_bytes for offset in offsets]
        other.gather(layer, starts, ids, layer_bytes=layout.layer_bytes, mark=None)
    assert torch.equal(back.tensor, blocks._arena.tensor)


@pytest.mark.parametrize("form", ["kv_first", "block_first", "mla"])
def test_skipped_blocks_are_unchanged_and_whole_skipped_chunks_cross_no_bus(form: str, seed: int) -> None:
    cache = _cache(form)
    layout = cache.layout
    memory, offsets = _memory(layout, seed)
    blocks = DeviceBlocks(DeviceSide(cache, StagingRing(torch, "cpu", layout.layer_bytes)), memory)
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
    ids[:4], ids[9], ids[30:33] = -1, -1, -1
    spread = blocks.plan(offsets, ids)
    assert len(spread.offsets) == CHUNKS - 3
    blocks.queue_spread(0, spread, layout.layer_bytes, None)
    planes = blocks._side.planes[0]
    for place, block in enumerate(ids.tolist()):
        chunk, part = divmod(place, 2)
        for number, plane in enumerate(planes):
            size = layout.layer_bytes // len(planes) // 2
            start = offsets[chunk] + number * 2 * size + part * size
            if block >= 0:
                row = plane[block].view(torch.uint8)
                assert torch.equal(row, memory.tensor[start : start + size]), (place, number)
    untouched = sorted(set(range(BLOCKS)) - set(ids.tolist()))
    assert not any(plane[untouched].any() for plane in planes)


def test_a_load_takes_block_ids_on_the_device_and_nothing_else(seed: int) -> None:
    cache = _cache("kv_first")
    layout = cache.layout
    memory, offsets = _memory(layout, seed)
    blocks = DeviceBlocks(DeviceSide(cache, StagingRing(torch, "cpu", layout.layer_bytes)), memory)
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
    taken = []
    for chunks in (2, CHUNKS):
        with Allocations() as allocations:
            spread = blocks.plan(offsets[:chunks], ids[: 2 * chunks])
            for layer in range(layout.layers):
                blocks.queue_spread(layer, spread, layout.layer_bytes, None)
        taken.append(allocations.bytes)
        assert allocations.calls["_foreach_copy_"] == layout.layers, "one call for each piece"
        assert "copy_" not in allocations.calls
        assert allocations.bytes <= 8 * 2 * chunks, "the ids themselves, once for all layers"
    with Allocations() as allocations:
        blocks.gather(0, list(offsets), ids, layer_bytes=layout.layer_bytes, mark=None)
    assert allocations.bytes <= 8 * len(ids)


def test_a_pool_makes_one_ring_for_a_device_and_one_side_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = torch.empty

    def noted(*arguments: Any, **more: Any) -> Any:
        made.append(arguments[0])
        return real(*arguments, **more)

    monkeypatch.setattr(torch, "empty", noted)
    copies, caches = Copies(_layout(2), 1), [_cache("kv_first"), _cache("block_first")]
    try:
        sides = [copies.side_of(cache) for cache in [*caches, *caches]]
        assert made == [device_ring.RING_BYTES]
        assert sides[0] is sides[2]
        assert sides[0] is not sides[1]
        assert sides[0].ring is sides[1].ring
        del sides, caches
        assert len(copies._sides) == 0, "what a cache had goes with it"
    finally:
        copies.stop()


class Stream:
    """A CUDA stream as the ring sees it."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def test_a_piece_waits_for_other_streams_that_use_its_bytes_and_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_ring, "RING_BYTES", 4096)
    ring, loads, saves = StagingRing(torch, "cpu", 64), Stream(), Stream()
    with ring.lock:
        first = ring.take(1500, loads)
        ring.give_back(first, loads, "first")
        second = ring.take(2048, saves)
        ring.give_back(second, saves, "second")
        assert (first.storage_offset(), second.storage_offset()) == (0, 1536)
        assert (loads.waited, saves.waited) == ([], [])
        third = ring.take(2000, loads)
        assert third.storage_offset() == 0
        assert loads.waited == ["second"], "its own stream's pieces come before it by themselves"
        ring.give_back(third, loads, "third")
        fourth = ring.take(2048, saves)
        assert (fourth.storage_offset(), saves.waited) == (2048, [])
        ring.give_back(fourth, saves, "fourth")
        ring.take(1000, saves)
        assert saves.waited == ["third"]
        ring.take(100, loads)
        assert loads.waited == ["second"], "what is left of the third piece is its own"
        assert len(ring._under_way) == 2
    assert ring.size == 4096


def test_threads_share_a_ring_of_one_piece(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(device_ring, "RING_BYTES", 1 << 12)
    ring = StagingRing(torch, "cpu", _layout(2).layer_bytes)
    outcomes: list[bool] = []

    def work(number: int) -> None:
        cache = _cache("kv_first")
        memory, _ = _memory(cache.layout, seed + number)
        back, _ = _memory(cache.layout, seed + number + 100)
        side = DeviceSide(cache, ring)
        ids = np.random.default_rng(number).permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
        size = cache.layout.layer_bytes
        offsets = [chunk * cache.layout.chunk_bytes for chunk in range(CHUNKS)]
        blocks = DeviceBlocks(side, memory)
        spread = blocks.plan(offsets, ids)
        for layer in range(2):
            blocks.queue_spread(layer, spread, size, None)
            starts = [offset + layer * size for offset in offsets]
            DeviceBlocks(side, back).gather(layer, starts, ids, layer_bytes=size, mark=None)
        outcomes.append(torch.equal(memory.tensor, back.tensor))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4


def test_rows_that_are_not_of_whole_words_are_copied_as_bytes() -> None:
    layers = [torch.zeros((BLOCKS, 2, 16, 1, 3), dtype=torch.uint8)[:, :, :, :, :] for _ in range(1)]
    layout = kv.Layout(layers=1, kv_heads=1, head_dim=3, dtype="uint8", chunk_tokens=16)
    cache = Cache(layers, layout, block_tokens=16, form="block_first")
    assert DeviceSide(cache, StagingRing(torch, "cpu", layout.layer_bytes)).item == torch.int64
    odd = torch.zeros(BLOCKS * 96 + 1, dtype=torch.uint8)[1:].view(BLOCKS, 2, 16, 1, 3)
    side = DeviceSide(Cache([odd], layout, block_tokens=16, form="block_first"), StagingRing(torch, "cpu", 96))
    assert side.item == torch.uint8


def test_a_save_sums_each_byte_once_however_often_its_checksums_are_read(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Layers are reported to the daemon one by one while they are copied, and all of them at the commit."""
    cache = _cache("kv_first")
    layout, summed = cache.layout, []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(kvpool_native, name)

        def extent_checksums(self, mapping: kvpool_native.Mapping, start: int, size: int, layers: int) -> bytes:
            summed.append(size * layers)
            return kvpool_native.extent_checksums(mapping, start, size, layers)

    monkeypatch.setattr(device_runs, "kvpool_native", Counted())
    mapping = kvpool_native.Mapping.create("saved", CHUNKS * layout.chunk_bytes)
    ring = StagingRing(torch, "cpu", layout.layer_bytes)
    blocks = DeviceBlocks(DeviceSide(cache, ring), PinnedBytes(mapping.view(), "cpu"))
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: 2 * CHUNKS].astype(np.int64)
    offsets = [number * layout.chunk_bytes for number in range(CHUNKS)]
    save = device_runs.DeviceSave(blocks, mapping, layout, offsets=offsets, block_ids=ids)
    for layer in range(layout.layers):
        save.announce(layer)
        assert save.wait(20.0)
        assert len(save.checksums_from(layer)) == 4 * CHUNKS
    expected = b"".join(
        kvpool_native.extent_checksums(mapping, offset, layout.layer_bytes, layout.layers) for offset in offsets
    )
    assert save.checksums() == save.checksums() == expected
    assert sum(summed) == CHUNKS * layout.chunk_bytes
