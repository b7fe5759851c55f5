"""The emulated driver itself: what the other tests of devices rest on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvpool_native import Device
from tests.rigs.device import emulated

TIMEOUT_S = 120.0
pytestmark = emulated.NEEDS_ORDERS


def _run(code: str, environment: dict[str, str], fds: tuple[int, ...] = ()) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"import os, kvpool_native\nDRIVER = os.environ['KVPOOL_CUDA_DRIVER']\n{code}"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, pass_fds=fds, check=False
    )


def test_a_host_that_touches_device_memory_dies() -> None:
    code = "import ctypes\nctypes.string_at(kvpool_native.Device(DRIVER, 0).allocate(1).address)"
    assert _run(code, emulated.environment()).returncode == -signal.SIGSEGV


def test_another_process_follows_the_orders_of_a_file(tmp_path: Path) -> None:
    control = emulated.Control(tmp_path / "control")
    control.order("fail cuMemCreate 1 2")
    code = """
device = kvpool_native.Device(DRIVER, 0)
try:
    device.allocate(1)
except RuntimeError as failed:
    print(failed)
print(device.allocate(1).size)
"""
    done = _run(code, {**emulated.environment(), **control.environment})
    assert done.stdout.splitlines() == ["cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)", str(2 << 20)]


def test_a_copy_whose_memory_is_freed_before_it_is_done_ends_the_device() -> None:
    """Other memory has the same addresses then."""
    code = """
import ctypes
import struct
device = kvpool_native.Device(DRIVER, 0)
memory, stream = device.allocate(1), device.stream()
target, address = ctypes.create_string_buffer(100), memory.address
order = ctypes.CDLL(DRIVER).kvpool_emulated_control
order(b"hang 1")
stream.copy(*(struct.pack("<Q", word) for word in (ctypes.addressof(target), address, 100)))
event = stream.record()
del memory
others = [device.allocate(1) for _ in range(4)]
order(b"hang 0")
try:
    event.wait(60.0)
except RuntimeError as failed:
    print(failed)
"""
    done = _run(code, emulated.environment())
    assert done.stdout.strip() == "cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert "memory was freed before a copy of it was done" in done.stderr


def test_another_processs_memory_is_mapped_by_its_descriptor() -> None:
    device = Device(emulated.driver_path(), 0)
    memory, stream = device.allocate(1), device.stream()
    source = emulated.EmulatedArray(np.arange(100, dtype=np.uint8))
    columns = [np.array([number], dtype=np.uint64).tobytes() for number in (memory.address, source.address, 100)]
    stream.copy(*columns)
    assert stream.record().wait(TIMEOUT_S)
    fd = memory.export()
    code = f"""
import ctypes
import struct
device = kvpool_native.Device(DRIVER, 1)
memory = device.attach({fd}, {memory.size})
target, stream = ctypes.create_string_buffer(100), device.stream()
stream.copy(struct.pack("<Q", ctypes.addressof(target)), struct.pack("<Q", memory.address), struct.pack("<Q", 100))
assert stream.record().wait({TIMEOUT_S})
print(target.raw == bytes(range(100)))
"""
    done = _run(code, emulated.environment(order="1,0"), (fd,))
    os.close(fd)
    assert done.stdout.strip() == "True", done.stderr
