"""Device bindings: what crosses, what is refused, and by which exception. Bytes and orders: native/tests/device."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvpool_native import CacheView, Device, Mapping
from tests.rigs.device import emulated

UNIT = 2 << 20
BLOCKS, CHUNK_BLOCKS, BLOCK_BYTES = 16, 4, 100
LAYER_BYTES = 2 * CHUNK_BLOCKS * BLOCK_BYTES
TIMEOUT_S = 60.0


@pytest.fixture(params=list(emulated.METHODS))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that copies by each method in turn."""
    for name, value in emulated.environment(request.param).items():
        monkeypatch.setenv(name, value)
    device = Device(emulated.driver_path(), 0)
    assert device.copy_method == request.param
    yield device
    emulated.order("clear 1")


def _view(engine: emulated.EmulatedArray) -> CacheView:
    bases = [engine.address, engine.address + 2 * BLOCKS * BLOCK_BYTES]
    strides = {"plane_stride": BLOCKS * BLOCK_BYTES, "block_stride": BLOCK_BYTES}
    return CacheView(bases, planes=2, blocks=BLOCKS, plane_block_bytes=BLOCK_BYTES, owner=engine, **strides)


def _random(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def _packed(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int64).tobytes()


def test_a_device_says_what_it_is(device: Device) -> None:
    if emulated.REAL:
        assert (len(device.uuid), bool(device.name)) == (16, True)
    else:
        assert (device.uuid, device.name) == (b"emulated-device0", "Emulated Device 0")
        assert device.driver_version in {12040, 13000}
    assert device.ordinal == 0
    assert device.driver_version >= 12000
    assert device.copy_method in repr(device)


def test_a_layer_goes_from_the_engine_into_chunks_and_back(device: Device) -> None:
    layers = _random((2, 2, BLOCKS, BLOCK_BYTES))
    engine = emulated.EmulatedArray(layers)
    arena = Mapping.create("arena", 1 << 16)
    pinned = device.pin(arena, writable=True)
    assert pinned.is_pinned
    assert pinned.fault == ""
    start = arena.view().ctypes.data
    stream = device.stream()
    stream.wait_for(device.mark(0))
    chunks = _packed(start, start + LAYER_BYTES)
    stream.gather(_view(engine), 1, _packed(1, 2, 3, 9, 0, 5, -1, 6), chunks, LAYER_BYTES)
    assert stream.record().wait(TIMEOUT_S)
    found = arena.view()[: 2 * LAYER_BYTES].reshape(2, 2, CHUNK_BLOCKS, BLOCK_BYTES)
    assert (found[0] == layers[1][:, [1, 2, 3, 9]]).all()
    assert (found[1][:, [0, 1, 3]] == layers[1][:, [0, 5, 6]]).all()
    assert not found[1][:, 2].any()

    stream.scatter(_view(engine), 0, _packed(15, -1, 7, 4, 8, 10, 11, 12), chunks, LAYER_BYTES)
    event = stream.record()
    assert event.wait(TIMEOUT_S)
    assert event.is_done()
    layers[0][:, [15, 7, 4]] = found[0][:, [0, 2, 3]]
    layers[0][:, [8, 10, 11, 12]] = found[1]
    assert (engine.read() == layers).all()


def test_a_stream_reads_what_an_engines_stream_has_written_before_a_mark(device: Device) -> None:
    engine, writer = emulated.EmulatedArray(np.zeros(100_000, dtype=np.uint8)), emulated.EmulatedStream()
    copied, stream = emulated.EmulatedArray(np.zeros(100_000, dtype=np.uint8)), device.stream()
    for value in range(1, 9):
        writer.write(engine, np.full(100_000, value, dtype=np.uint8))
        stream.wait_for(device.mark(writer.handle))
        stream.copy(_packed(copied.address), _packed(engine.address), _packed(100_000))
        assert stream.record().wait(TIMEOUT_S)
        assert (copied.read() == value).all()
    writer.free()


def test_memory_is_shared_by_its_descriptor(device: Device) -> None:
    memory = device.allocate(UNIT - 1)
    assert memory.size == UNIT
    fd = memory.export()
    attached = device.attach(fd, memory.size)
    os.close(fd)
    source = emulated.EmulatedArray(_random((3000,)))
    target = emulated.EmulatedArray(np.zeros(3000, dtype=np.uint8))
    stream = device.stream()
    stream.copy(_packed(memory.address), _packed(source.address), _packed(3000))
    stream.copy(_packed(target.address), _packed(attached.address), _packed(3000))
    assert stream.record().wait(TIMEOUT_S)
    assert (target.read() == source.read()).all()


def test_an_address_has_its_devices_ordinal(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, ordinals = emulated.driver_path(), list(range(min(2, emulated.count_devices())))
    arrays = [emulated.EmulatedArray(np.zeros(4, dtype=np.int32), ordinal=ordinal) for ordinal in ordinals]
    assert [Device.ordinal_of(array.address) for array in arrays] == ordinals
    assert Device.ordinal_of(np.zeros(4).ctypes.data) is None
    monkeypatch.setenv("KVPOOL_CUDA_DRIVER", "libno-such-driver.so")
    with pytest.raises(OSError, match=r"libno-such-driver\.so"):
        Device.ordinal_of(arrays[0].address)
    assert Device.ordinal_of(arrays[0].address, driver) == 0


def test_a_wait_ends_with_its_time_while_the_device_hangs(device: Device) -> None:
    stream = device.stream()
    memory = device.allocate(UNIT)
    emulated.order("hang 1")
    stream.copy(_packed(memory.address), _packed(memory.address + 4096), _packed(100))
    event = stream.record()
    assert not event.wait(0.01)
    assert not event.is_done()
    emulated.order("clear 1")
    assert event.wait(TIMEOUT_S)


def test_what_fails_is_named(device: Device) -> None:
    stream = device.stream()
    with pytest.raises(RuntimeError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        Device(emulated.driver_path(), 9)
    with pytest.raises(OSError, match=r"libno-such-driver\.so.*hbm\.driver"):
        Device("libno-such-driver.so", 0)
    emulated.order(
        "fail cuMemCreate 1 2\nfail cuStreamCreate 1 999\nfail cuEventRecord 2 999\nfail cuMemHostRegister_v2 1 2"
    )
    with pytest.raises(RuntimeError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        device.allocate(UNIT)
    with pytest.raises(RuntimeError, match=r"cuStreamCreate failed: CUDA_ERROR_UNKNOWN \(999\)"):
        device.stream()
    stream.record()
    with pytest.raises(RuntimeError, match=r"cuEventRecord failed: CUDA_ERROR_UNKNOWN \(999\)"):
        device.mark(0)
    pinned = device.pin(Mapping.create("arena", 4096), writable=False)
    assert not pinned.is_pinned
    assert pinned.fault == "cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)"


def test_what_does_not_fit_is_refused(device: Device) -> None:
    engine = emulated.EmulatedArray(_random((2, 2, BLOCKS, BLOCK_BYTES)))
    stream, view = device.stream(), _view(engine)
    with pytest.raises(ValueError, match="outside the view"):
        stream.scatter(view, 0, _packed(1, 2, 3, BLOCKS), _packed(4096), LAYER_BYTES)
    with pytest.raises(ValueError, match="no such extent"):
        stream.gather(view, 2, _packed(1, 2, 3, 4), _packed(4096), LAYER_BYTES)
    with pytest.raises(ValueError, match="make up an extent"):
        stream.scatter(view, 0, _packed(1, 2, 3), _packed(4096), LAYER_BYTES)
    with pytest.raises(ValueError, match="no column"):
        stream.scatter(view, 0, b"123", _packed(4096), LAYER_BYTES)
    with pytest.raises(ValueError, match="differ in length"):
        stream.copy(_packed(1, 2), _packed(1), _packed(1))
    with pytest.raises(ValueError, match="size must be positive"):
        device.allocate(0)
    mapping = Mapping.create("arena", 4096)
    with pytest.raises(ValueError, match="read-only"):
        device.pin(Mapping.attach(mapping.fd, 4096, writable=False), writable=True)


def test_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated.environment("kernel").items():
        monkeypatch.setenv(name, value)
    gc.collect()
    before = emulated.live()
    device = Device(emulated.driver_path(), 1)
    memory, stream = device.allocate(UNIT), device.stream()
    pinned = device.pin(Mapping.create("arena", 4096), writable=True)
    stream.copy(_packed(memory.address), _packed(memory.address + 4096), _packed(100))
    event = stream.record()
    assert event.wait(TIMEOUT_S)
    assert emulated.live() != before
    del event, pinned, stream, memory, device
    assert emulated.live() == before
