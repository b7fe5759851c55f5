"""Loads onto a device out of the arena and out of copies in the device's own memory, without a daemon."""

from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.states import LoadReason
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.load import DeviceLoad
from tests.rigs.device import emulated
from tests.rigs.device.loading import CHUNKS, LAYOUT, LONG_S, Loading


@pytest.mark.parametrize("with_copies", [(), (0, 3, 5), tuple(range(CHUNKS))])
def test_chunks_come_from_the_arena_and_from_copies(
    device: kvpool_native.Device, with_copies: tuple[int, ...], seed: int
) -> None:
    loading = Loading(device, seed)
    for row in with_copies:  # its bytes in the arena are not looked at
        loading.corrupt(row, 2)
    load = loading.load(with_copies)
    assert [load.wait_extent(layer, LONG_S) for layer in range(5)] == [1] * 5
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


@pytest.mark.parametrize("with_copies", [(), (0, 1, 5, 6)])
def test_of_a_set_each_chunk_is_alone(device: kvpool_native.Device, with_copies: tuple[int, ...], seed: int) -> None:
    """One is corrupt in the arena, one is corrupt there behind a copy that goes, and the last one leaves it."""
    loading = Loading(device, seed)
    loading.corrupt(4, 3)
    loading.corrupt(6, 0)
    loading.drop_copies(6)
    loading.store.drop(7)
    load = loading.load(with_copies, is_set=True)
    assert [load.wait_extent(layer, LONG_S) for layer in range(5)] == [1] * 5
    assert load.wait(LONG_S)
    complete, checksum, gone = LoadReason.COMPLETE, LoadReason.CHECKSUM, LoadReason.GONE
    assert [*load.reasons()] == [*[complete] * 4, checksum, complete, checksum, gone]
    good = [0, 1, 2, 3, 5]
    assert [loading.loaded()[row] for row in good] == [loading.expected()[row] for row in good]


def test_a_set_of_which_nothing_is_left_ends(device: kvpool_native.Device, seed: int) -> None:
    loading = Loading(device, seed)
    loading.drop_chunks(0)
    load = loading.load((), is_set=True)
    assert load.wait(LONG_S)
    assert (load.wait_extent(0, 0.0), [*load.reasons()]) == (0, [LoadReason.GONE] * CHUNKS)


def test_an_error_of_the_driver_is_every_chunk_of_a_sets(device: kvpool_native.Device, seed: int) -> None:
    loading = Loading(device, seed)
    emulated.order("fail cuMemcpyBatchAsync 2 999")
    load = loading.load((), is_set=True)
    assert load.wait(LONG_S)
    assert [*load.reasons()] == [LoadReason.IO] * CHUNKS


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
    assert (load[0].chunks(), load[0].reason(), load[0].wait_extent(0, 0.0)) == (0, LoadReason.CANCELLED, 0)


@pytest.mark.parametrize("cancelled_at", range(9))
@pytest.mark.parametrize("lost_at", range(LAYOUT.layers))
def test_a_cancelled_load_counts_nothing_behind_a_layer_of_a_lost_copy(
    device: kvpool_native.Device, monkeypatch: pytest.MonkeyPatch, lost_at: int, cancelled_at: int, seed: int
) -> None:
    """What was queued before the loss is seen comes from the copy, what is queued afterwards from the arena: that is in place,
    but a layer before it may have been left as it is."""
    loading, waits = Loading(device, seed), iter(range(100))
    is_cancelled = False
    queue, wait_for, has_cancelled = DeviceBlocks.queue_spread, DeviceBlocks.wait, DeviceLoad._has_cancelled

    def queued(self: DeviceBlocks, layer: int, *arguments: Any, **named: Any) -> kvpool_native.DeviceEvent:
        if layer == lost_at and layer not in seen:
            loading.drop_copies(0)
        seen.add(layer)
        return queue(self, layer, *arguments, **named)

    def waited(self: DeviceBlocks, event: kvpool_native.DeviceEvent) -> None:
        nonlocal is_cancelled
        wait_for(self, event)
        is_cancelled = is_cancelled or next(waits) == cancelled_at

    seen: set[int] = set()
    monkeypatch.setattr(DeviceBlocks, "queue_spread", queued)
    monkeypatch.setattr(DeviceBlocks, "wait", waited)
    monkeypatch.setattr(DeviceLoad, "_has_cancelled", lambda self: is_cancelled or has_cancelled(self))
    load = loading.load((0,))
    assert load.wait(LONG_S)
    chunks, found, expected = load.chunks(), loading.loaded(), loading.expected()
    assert found[:chunks] == expected[:chunks]
    assert chunks in (0, CHUNKS)
    for layer in range(LAYOUT.layers):
        part = slice(layer * LAYOUT.layer_bytes, (layer + 1) * LAYOUT.layer_bytes)
        assert load.wait_extent(layer, 0.0) == 0 or found[0][part] == expected[0][part]


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
