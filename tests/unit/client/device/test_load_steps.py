"""Loads onto a device between whose steps a copy, or the chunk itself, goes, and others' bytes come in its place.

Each step of the load's thread is tried: all that it asks of its sources and of the device, before and after. Meanwhile the
device copies, so that it reads old bytes, others', or some of both.
"""

import random
import threading
from collections.abc import Callable

import pytest

import kvpool_native
from kvpool.states import LoadReason
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.load import DeviceLoad
from kvpool_client.copying.device.sources import Sources
from tests.rigs.device import emulated
from tests.rigs.device.loading import CHUNKS, LAYOUT, LONG_S, Loading
from tests.rigs.device.steps import at_steps

pytestmark = pytest.mark.parametrize("device", ["batch", "kernel"], indirect=True)
STEPS = (
    (Sources, ("addresses", "from_copies", "verify_lost", "lost_of")),
    (DeviceBlocks, ("queue_spread", "wait")),
    (DeviceLoad, ("_fail_gone",)),
)
DROPPED, SOME = 2, (0, 1, 2, 3, 5)
EVENTS: dict[str, tuple[Callable[[Loading, int], None], ...]] = {
    "copies": (Loading.drop_copies,),
    "chunks": (Loading.drop_chunks,),
    "both": (Loading.drop_copies, Loading.drop_chunks),
}


def _loaded(
    device: kvpool_native.Device,
    seed: int,
    number: int,
    *,
    event: str,
    with_copies: tuple[int, ...],
    cancelled_at: int | None = None,
) -> int:
    """A load of chunks, some with copies, with an event at one of its steps, and cancelled at another: how many steps it
    took."""
    loading, cancelled = Loading(device, seed), threading.Event()
    acts: dict[int, Callable[[], object]] = {number: lambda: [drop(loading, DROPPED) for drop in EVENTS[event]]}
    if cancelled_at is not None:
        acts[cancelled_at] = cancelled.set
    with pytest.MonkeyPatch.context() as patched, at_steps(STEPS, acts) as names:
        patched.setattr(DeviceLoad, "_has_cancelled", lambda _: cancelled.is_set())
        load = loading.load(with_copies)
        assert load.wait(LONG_S)
    at = f"{event} went {names[number] if number < len(names) else 'never'}, step {number}, cancelled at {cancelled_at}"
    _check(load, loading, at)
    found, reason = load.chunks(), load.reason()
    if cancelled_at is not None:
        return len(names)
    if event == "copies":
        assert (found, reason) == (CHUNKS, LoadReason.COMPLETE), at
    else:
        assert (found, reason) in ((CHUNKS, LoadReason.COMPLETE), (DROPPED, LoadReason.GONE)), at
    return len(names)


def _check(load: DeviceLoad, loading: Loading, at: str) -> None:
    """What counts has the right bytes: chunks, and layers of those that were not lost."""
    found, expected, size = loading.loaded(), loading.expected(), LAYOUT.layer_bytes
    assert found[: load.chunks()] == expected[: load.chunks()], at
    for layer in range(LAYOUT.layers):
        part = slice(layer * size, (layer + 1) * size)
        if load.wait_extent(layer, 0.0) == 1:
            good = load._good_chunks().tolist()
            assert [found[row][part] for row in good] == [expected[row][part] for row in good], at


@pytest.mark.parametrize(
    ("event", "with_copies"), [("copies", SOME), ("chunks", ()), ("chunks", SOME), ("both", SOME)], ids=str
)
@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
def test_no_step_of_a_load_takes_others_bytes(
    device: kvpool_native.Device, event: str, with_copies: tuple[int, ...], share: float, seed: int
) -> None:
    dice = random.Random(seed)
    steps = _loaded(device, seed, -1, event=event, with_copies=with_copies)
    for number in range(steps):
        if dice.random() < share:
            emulated.order(f"delay_us {dice.choice((0, 200, 2000))}")
            _loaded(device, dice.randrange(1 << 32), number, event=event, with_copies=with_copies)


@pytest.mark.parametrize("share", [0.01, pytest.param(0.2, marks=pytest.mark.slow)])
def test_no_step_of_a_cancelled_load_counts_others_bytes(device: kvpool_native.Device, share: float, seed: int) -> None:
    dice = random.Random(seed)
    steps = _loaded(device, seed, -1, event="copies", with_copies=SOME)
    for number in range(steps):
        for cancelled_at in range(number + 1, steps):
            if dice.random() < share:
                emulated.order(f"delay_us {dice.choice((0, 200))}")
                again = dice.randrange(1 << 32)
                _loaded(device, again, number, event="copies", with_copies=SOME, cancelled_at=cancelled_at)
