"""Saves from a device without a daemon: order of layers, work of the engine, checksums, failures, and the end."""

from typing import Any

import pytest

import kvpool_native
from kvpool_client.copying.device import extents
from kvpool_client.copying.device.gatherer import DeviceGatherer
from kvpool_client.copying.gather import Piece
from tests.rigs.device import emulated
from tests.rigs.device.engine import engine_stream
from tests.rigs.device.saving import CHUNKS, LONG_S, Saving


@pytest.mark.parametrize("form", ["kv_first", "block_first", "packed", "mla"])
def test_layers_in_any_order_arrive_whole(device: kvpool_native.Device, form: str, seed: int) -> None:
    saving = Saving(device, form, seed)
    saving.engine.write(saving.layers)
    save = saving.save()
    assert save.announce(2)
    assert not save.announce(2)
    assert save.wait(LONG_S)
    assert (save.copied_extents(), save.progress()) == (0, 1)
    save.announce_all()
    assert save.wait(LONG_S)
    assert save.copied_extents() == 3
    assert saving.stored() == saving.expected()
    assert save.checksums() == saving.checksums()


def test_a_save_sums_each_byte_once_however_often_its_checksums_are_read(
    device: kvpool_native.Device, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Layers are reported to the daemon one by one while they are copied, and all of them at the commit."""
    saving, summed = Saving(device, "kv_first", seed), []
    saving.engine.write(saving.layers)

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(kvpool_native, name)

        def extent_checksums(self, mapping: kvpool_native.Mapping, start: int, size: int, layers: int) -> bytes:
            summed.append(size * layers)
            return kvpool_native.extent_checksums(mapping, start, size, layers)

    monkeypatch.setattr(extents, "kvpool_native", Counted())
    save = saving.save()
    for layer in range(3):
        save.announce(layer)
        assert save.wait(LONG_S)
        assert len(save.checksums_from(layer)) == 4 * CHUNKS
    assert save.checksums() == save.checksums() == saving.checksums()
    assert sum(summed) == CHUNKS * saving.layout.chunk_bytes


@pytest.mark.parametrize("form", ["kv_first", "block_first"])
def test_layers_that_the_engine_still_writes_are_waited_for(device: kvpool_native.Device, form: str, seed: int) -> None:
    with engine_stream() as stream:
        emulated.order("delay_us 20000")
        saving = Saving(device, form, seed, stream)
        save = saving.save()
        for layer in (1, 0, 2):
            stream.write(saving.engine.arrays[layer], saving.layers[layer])
            assert save.announce(layer)
        assert save.wait(LONG_S)
        assert saving.stored() == saving.expected()


def test_a_save_that_is_cancelled_behind_the_engines_work_ends_at_once(device: kvpool_native.Device, seed: int) -> None:
    with engine_stream() as stream:
        saving = Saving(device, "kv_first", seed, stream)
        save = saving.save()
        emulated.order("hang 1")
        stream.write(saving.engine.arrays[0], saving.layers[0])
        save.announce_all()
        assert not save.wait(0.01)
        save.cancel()
        assert save.is_cancelled()
        emulated.order("hang 0")
        stream.wait()
        assert not saving.memory.view().any()


def test_an_announcement_that_the_driver_refuses_gives_the_save_up(device: kvpool_native.Device, seed: int) -> None:
    saving = Saving(device, "kv_first", seed)
    save = saving.save()
    emulated.order("fail cuEventRecord 1 999")
    assert save.announce(0)
    assert save.wait(LONG_S)
    assert save.is_cancelled()
    save.cancel()


@pytest.mark.parametrize("form", ["kv_first", "mla"])
def test_a_piece_is_gathered_into_its_window(device: kvpool_native.Device, form: str, seed: int) -> None:
    saving = Saving(device, form, seed)
    saving.engine.write(saving.layers)
    gatherer = DeviceGatherer(
        saving.blocks, saving.memory, extents=saving.extents, block_ids=saving.ids.reshape(CHUNKS, 2)
    )
    for layer in (2, 1):
        gatherer.announce(layer)
    size = saving.layout.layer_bytes
    gathering = gatherer.begin_piece(Piece(first_chunk=3, chunks=4, first_layer=1, layers=2), size)
    assert gathering.wait(LONG_S)
    assert (gathering.progress(), gathering.is_cancelled()) == (8, False)
    window = saving.memory.view()[size : size + 8 * size].reshape(4, 2 * size)
    assert [row.tobytes() for row in window] == [chunk[size:] for chunk in saving.expected()[3:7]]
    assert gathering.checksums() == b"".join(
        kvpool_native.extent_checksums(saving.memory, size + 2 * size * row, size, 2) for row in range(4)
    )


@pytest.mark.parametrize("order", ["fail cuEventRecord 1 999", "fail cuEventRecord 2 999", "fail cuEventQuery 1 999"])
def test_a_piece_that_the_device_refuses_is_given_up(device: kvpool_native.Device, order: str, seed: int) -> None:
    saving = Saving(device, "kv_first", seed)
    gatherer = DeviceGatherer(
        saving.blocks, saving.memory, extents=saving.extents, block_ids=saving.ids.reshape(CHUNKS, 2)
    )
    emulated.order(order)
    gatherer.announce(0)
    gathering = gatherer.begin_piece(Piece(0, CHUNKS, 0, 1), 0)
    assert gathering.wait(LONG_S)
    assert gathering.is_cancelled()
    gathering.cancel()
