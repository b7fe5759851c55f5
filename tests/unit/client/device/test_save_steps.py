"""Saves from a device that are cancelled between the steps of their thread: afterwards the slots are others'."""

import random
import threading

import pytest

import kvpool_native
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.save import DeviceSave
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated
from tests.rigs.device.saving import LONG_S, Saving
from tests.rigs.device.steps import at_steps

pytestmark = pytest.mark.parametrize("device", ["batch", "kernel"], indirect=True)
STEPS = ((DeviceBlocks, ("queue_gather", "wait")), (DeviceSave, ("_begin", "_checksums_of")))
OTHERS = 0x55


class _Cancelled:
    """A save that is cancelled while its own thread stands still, by another one, which gives the slots to others then."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self.save = saving.save()
        self._thread = threading.Thread(target=self._cancel)

    def begin(self) -> None:
        """Cancel it. On the save's own thread."""
        self._thread.start()
        wait_until(self.save.is_cancelled, "it is cancelled")

    def end(self) -> None:
        """Until all that was queued is done."""
        self._thread.join(LONG_S)
        assert self._saving.cache.side is not None
        assert self._saving.cache.side.save_stream.record().wait(LONG_S)

    def _cancel(self) -> None:
        self.save.cancel()
        self._saving.memory.view()[...] = OTHERS


def _cancelled(device: kvpool_native.Device, seed: int, number: int) -> int:
    """A save that is cancelled at one of its steps: how many steps it took."""
    saving = Saving(device, "kv_first", seed)
    saving.engine.write(saving.layers)
    cancelled = _Cancelled(saving)
    with at_steps(STEPS, {number: cancelled.begin}) as names:
        cancelled.save.announce_all()
        assert cancelled.save.wait(LONG_S)
        if number < 0:
            wait_until(lambda: not cancelled.save._thread.is_alive(), "all steps are taken")
            return len(names)
        cancelled.end()
    assert (saving.memory.view() == OTHERS).all(), f"written after it was cancelled {names[number]}, step {number}"
    return len(names)


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_no_step_of_a_cancelled_save_writes_to_others_slots(
    device: kvpool_native.Device, share: float, seed: int
) -> None:
    dice = random.Random(seed)
    steps = _cancelled(device, seed, -1)
    for number in range(steps - 1):  # behind the last one nothing is left to cancel
        if dice.random() < share:
            emulated.order(f"delay_us {dice.choice((0, 200, 2000))}")
            _cancelled(device, dice.randrange(1 << 32), number)
