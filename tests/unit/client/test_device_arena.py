"""Host memory registered with a device's driver: when it is registered, refusals of the driver, and its release."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.copying.device_arena import PinnedBytes  # noqa: E402
from tests.rigs.daemon import wait_until  # noqa: E402

pytestmark = pytest.mark.torch


class Driver:
    """`torch.cuda` as far as registration needs it; keeps what is registered."""

    def __init__(self, code: int = 0, refusal: Exception | None = None) -> None:
        self.registered: dict[int, int] = {}
        self._code = code
        self._refusal = refusal

    def device(self, name: str) -> Any:
        return nullcontext(name)

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop)

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        if self._refusal is not None:
            raise self._refusal
        if self._code == 0:
            self.registered[address] = size
        return self._code


def test_memory_for_the_cpu_is_not_registered() -> None:
    memory = np.zeros(64, np.uint8)
    pinned = PinnedBytes(memory, "cpu")
    assert not pinned.is_pinned
    pinned.tensor[3] = 7
    assert memory[3] == 7


def test_registered_memory_is_unregistered_once() -> None:
    driver, memory = Driver(), np.zeros(64, np.uint8)
    pinned = PinnedBytes(memory, "cpu")
    pinned._register(driver, "cuda:0")
    assert pinned.is_pinned
    assert driver.registered == {memory.ctypes.data: 64}
    pinned.close()
    pinned.close()
    assert driver.registered == {}
    pinned._register(driver, "cuda:0")
    assert not pinned.is_pinned


def test_memory_without_a_holder_is_unregistered() -> None:
    driver = Driver()
    pinned = PinnedBytes(np.zeros(64, np.uint8), "cpu")
    pinned._register(driver, "cuda:0")
    del pinned
    assert driver.registered == {}


@pytest.mark.parametrize("driver", [Driver(code=2), Driver(refusal=RuntimeError("CUDA error"))])
def test_a_driver_that_refuses_leaves_it_unregistered(driver: Driver) -> None:
    pinned = PinnedBytes(np.zeros(64, np.uint8), "cpu")
    pinned._register(driver, "cuda:0")
    assert not pinned.is_pinned


@pytest.mark.gpu
def test_a_real_driver_registers() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    pinned = PinnedBytes(np.zeros(1 << 20, np.uint8), "cuda:0")
    wait_until(lambda: pinned.is_pinned, "registered")
    assert pinned.tensor.is_pinned()
    pinned.close()
