"""Host memory registered with a device's driver: when it is registered, refusals of the driver, and its release."""

import gc
from functools import partial

import pytest

import kvpool_native
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated


def _memory(writable: bool = True) -> kvpool_native.Mapping:
    made = kvpool_native.Mapping.create("memory", 1 << 16)
    return kvpool_native.Mapping.attach(made.fd, made.size, writable=writable)


def _is_pinned(memory: PinnedBytes) -> bool:
    return memory.is_pinned


def test_memory_for_the_cpu_is_not_registered() -> None:
    pinned = PinnedBytes(_memory(), None)
    assert not pinned.is_pinned
    pinned.close()


@pytest.mark.parametrize("writable", [True, False])
def test_registered_memory_is_unregistered_once(device: kvpool_native.Device, writable: bool) -> None:
    if not writable and not device.registers_read_only:
        pytest.skip("this device registers no memory that is mapped read-only")
    pinned = PinnedBytes(_memory(writable), device)
    wait_until(lambda: pinned.is_pinned, "registered")
    assert emulated.live()["registrations"] == 1
    pinned.close()
    pinned.close()
    assert not pinned.is_pinned
    assert emulated.live()["registrations"] == 0


def test_memory_without_a_holder_is_unregistered(device: kvpool_native.Device) -> None:
    pinned = PinnedBytes(_memory(), device)
    wait_until(partial(_is_pinned, pinned), "registered")
    del pinned
    gc.collect()
    assert emulated.live()["registrations"] == 0


def test_memory_that_is_closed_at_once_does_not_stay_registered(device: kvpool_native.Device) -> None:
    calls = emulated.calls("cuMemHostRegister_v2")
    pinned = PinnedBytes(_memory(), device)
    pinned.close()
    wait_until(lambda: emulated.calls("cuMemHostRegister_v2") > calls, "the driver was asked")
    wait_until(lambda: emulated.live()["registrations"] == 0, "nothing is registered")
    assert not pinned.is_pinned


def test_a_driver_that_refuses_leaves_it_unregistered(device: kvpool_native.Device) -> None:
    emulated.order("fail cuMemHostRegister_v2 0 2")
    calls = emulated.calls("cuMemHostRegister_v2")
    pinned = PinnedBytes(_memory(), device)
    wait_until(lambda: emulated.calls("cuMemHostRegister_v2") > calls, "the driver was asked")
    assert not pinned.is_pinned
    pinned.close()
