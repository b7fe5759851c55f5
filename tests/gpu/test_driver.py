"""A real driver, where an emulated one shows nothing: memory that it registers, kernels that it compiles, maps that it
protects, and a context that is lost for good.

The rehearsal runs the same on the emulated driver, as far as that has it.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvpool_native
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from tests.gpu import setting
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated
from tests.rigs.device.device_daemon import DeviceDaemon, DeviceEngine
from tests.rigs.device.emulated import EmulatedArray
from tests.rigs.payload import store, tokens_of

CHUNKS = 8
SIZE = 1 << 20
WAIT_S = 60.0
# An engine that loads, loses its context in a kernel of its own, and asks for another load.
LOSES_ITS_CONTEXT = """
import os, sys, torch
import kvpool_client as kv
from kvpool_client.torch import PagedPrefixCache, layout_of

layers = [torch.zeros((2, 32, 16, 2, 16), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
layout = layout_of(layers, 32)
with kv.connect(sys.argv[1], model="lost", layout=layout) as pool:
    prefix = PagedPrefixCache(pool, layers, 16)
    tokens, blocks = list(range(8 * 32 + 1)), list(range(17))
    while not pool.connected:
        pass
    assert prefix.store(tokens, blocks).commit().stored == 8
    with prefix.restore(tokens, blocks) as restored:
        assert restored.settle() == 8 * 32
    try:
        torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
        torch.cuda.synchronize()
        raise SystemExit("the context is not lost")
    except RuntimeError:
        pass
    with prefix.restore(tokens, blocks) as restored:
        print("restored", restored.settle(), restored.reason, flush=True)
    os._exit(0)  # torch's own end may abort
"""


@pytest.mark.parametrize("method", emulated.METHODS)
def test_memory_that_is_not_registered_is_copied(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Every load before the arena is registered, which takes its time."""
    for name, value in emulated.environment(method).items():
        monkeypatch.setenv(name, value)
    device = kvpool_native.Device(emulated.driver_path(), 0)
    source, target = (np.arange(SIZE, dtype=np.uint32) * factor for factor in (7, 0))
    there, stream = EmulatedArray(np.zeros_like(source)), device.stream()
    size = np.array([source.nbytes], np.uint64).tobytes()
    addresses = [np.array([at], np.uint64).tobytes() for at in (source.ctypes.data, there.address, target.ctypes.data)]
    for begin, end in ((0, 1), (1, 2)):
        stream.copy(addresses[end], addresses[begin], size)
        assert stream.record().wait(WAIT_S)
    assert np.array_equal(source, target)


@pytest.mark.parametrize("method", emulated.METHODS)
def test_each_method_copies_the_bytes(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """An older driver has the kernel compiled from PTX, or copies one by one."""
    for name, value in emulated.environment(method).items():
        monkeypatch.setenv(name, value)
    device = kvpool_native.Device(emulated.driver_path(), 0)
    assert device.copy_method == method
    memory = kvpool_native.Mapping.create("copied", 2 * SIZE)
    pinned = PinnedBytes(memory, device)
    wait_until(lambda: pinned.is_pinned, "the memory is pinned", WAIT_S)
    dice = np.random.default_rng(1)
    pinned.bytes[:SIZE] = dice.integers(0, 256, SIZE, np.uint8)
    there, stream = EmulatedArray(np.zeros(SIZE, np.uint8)), device.stream()
    base, back, on_device = (np.uint64(at) for at in (pinned.address, pinned.address + SIZE, there.address))
    for sizes in (np.full(SIZE >> 12, 1 << 12, np.uint64), dice.integers(1, 5000, 150, np.uint64)):
        pinned.bytes[SIZE:] = 0
        begins = np.concatenate([np.zeros(1, np.uint64), sizes.cumsum(dtype=np.uint64)])
        end, places = int(begins[-1]), begins[:-1]  # of odd sizes: at odd addresses
        order = dice.permutation(len(sizes))
        columns = places[order], sizes[order].tobytes()
        stream.copy((on_device + columns[0]).tobytes(), (base + columns[0]).tobytes(), columns[1])
        stream.copy((back + columns[0]).tobytes(), (on_device + columns[0]).tobytes(), columns[1])
        assert stream.record().wait(WAIT_S)
        assert np.array_equal(pinned.bytes[SIZE : SIZE + end], pinned.bytes[:end])
        assert not pinned.bytes[SIZE + end :].any()
    pinned.close()


def test_memory_that_only_the_daemon_may_write_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client maps the arena read-only where it writes through staging memory."""
    setting_of_driver(monkeypatch)
    memory = kvpool_native.Mapping.create("read-only", SIZE)
    device = kvpool_native.Device(emulated.driver_path(), 0)
    mapped = kvpool_native.Mapping.attach(memory.fd, SIZE, writable=False)
    pinned = device.pin(mapped, False)
    fault = "" if device.registers_read_only else "the device registers no memory that is mapped read-only"
    assert (pinned.is_pinned, pinned.fault) == (not fault, fault)


def test_an_engine_cannot_write_to_the_copies_that_it_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting_of_driver(monkeypatch)
    with DeviceDaemon(tmp_path, **{"hbm.capacity": "4MiB"}) as daemon:
        daemon.wait_for_state("ok")
        with daemon.connect() as pool:
            keys = pool.keys(tokens_of(1, CHUNKS * 32))
            store(pool, keys)
            chain = [keys[at] for at in range(CHUNKS)]
        with DeviceEngine(daemon) as engine:
            engine.use(chain)
            daemon.wait_for_copies(CHUNKS)
            assert engine.use(chain) == CHUNKS
            done = _write_to_a_copy(daemon)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == ["refused"]
            assert engine.use(chain) == CHUNKS, "the bytes of all copies are right"
        assert daemon.problems() == []


def _write_to_a_copy(daemon: DeviceDaemon) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the driver may end the context of who tries."""
    code = f"""
import numpy as np
from pathlib import Path
from tests.rigs.device.device_daemon import DeviceDaemon, DeviceEngine
daemon = DeviceDaemon(Path({str(Path(daemon.socket).parent.parent)!r}))
daemon.socket = {daemon.socket!r}
engine = DeviceEngine(daemon)
source = np.full(4096, 0xEE, np.uint8)
words = [np.array([word], np.uint64).tobytes() for word in (engine.memory.address, source.ctypes.data, 4096)]
try:
    engine._stream.copy(*words)
    print("written" if engine._stream.record().wait({WAIT_S}) else "refused")
except RuntimeError:
    print("refused")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(setting.IS_REHEARSAL or not emulated.REAL, reason="an emulated driver runs no kernels of torch")
def test_an_engine_that_loses_its_context_gets_misses_and_costs_nobody_else(tmp_path: Path) -> None:
    with DeviceDaemon(tmp_path, **{"hbm.capacity": "4MiB"}) as daemon:
        daemon.wait_for_state("ok")
        command = [sys.executable, "-c", LOSES_ITS_CONTEXT, daemon.socket]
        lost = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert lost.returncode == 0, lost.stderr
        assert lost.stdout.split()[:2] == ["restored", "0"]
        with daemon.connect() as pool:
            keys = pool.keys(tokens_of(2, CHUNKS * 32))
            store(pool, keys)
            with DeviceEngine(daemon) as engine:
                chain = [keys[at] for at in range(CHUNKS)]
                wait_until(lambda: engine.use(chain) == CHUNKS, "all have copies", WAIT_S)
        assert daemon.problems() == []


def setting_of_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients of this process, and of those that it starts, use the driver."""
    for name, value in emulated.environment().items():
        monkeypatch.setenv(name, value)
