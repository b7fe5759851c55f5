"""Loads onto a device between whose steps a copy, or the chunk itself, goes, and others' bytes come in its place.

Each step of the load's thread is tried: all that it asks of its sources and of the device, before and after. Meanwhile the
device copies, so that it reads old bytes, others', or some of both.
"""

import random
from collections.abc import Callable, Iterator

import pytest

import kvpool_native
from kvpool.types import LoadReason
from kvpool_client.copying.device.blocks import DeviceBlocks
from kvpool_client.copying.device.driver import open_device
from kvpool_client.copying.device.load import DeviceLoad
from kvpool_client.copying.device.sources import Sources
from tests.rigs.device import emulated
from tests.rigs.device.engine import use_emulated_driver
from tests.rigs.device.loading import CHUNKS, LONG_S, Loading
from tests.rigs.device.steps import at_step

STEPS = (
    (Sources, ("addresses", "from_copies", "verify_lost", "lost_of")),
    (DeviceBlocks, ("queue_spread", "wait")),
    (DeviceLoad, ("_standing",)),
)
DROPPED, SOME = 2, (0, 1, 2, 3, 5)
EVENTS: dict[str, tuple[Callable[[Loading, int], None], ...]] = {
    "copies": (Loading.drop_copies,),
    "chunks": (Loading.drop_chunks,),
    "both": (Loading.drop_copies, Loading.drop_chunks),
}


@pytest.fixture(params=["batch", "kernel"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvpool_native.Device]:
    use_emulated_driver(monkeypatch, request.param)
    yield open_device("cuda:0")
    emulated.order("clear 1")


def _loaded(device: kvpool_native.Device, seed: int, number: int, *, event: str, with_copies: tuple[int, ...]) -> int:
    """A load of chunks, some with copies, with an event at one of its steps: how many steps it took."""
    loading = Loading(device, seed)
    with at_step(STEPS, number, lambda: [drop(loading, DROPPED) for drop in EVENTS[event]]) as names:
        load = loading.load(with_copies)
        assert load.wait(LONG_S)
    found, reason = load.chunks(), load.reason()
    at = f"{event} went {names[number] if number < len(names) else 'never'}, step {number}"
    assert loading.loaded()[:found] == loading.expected()[:found], at
    if event == "copies":
        assert (found, reason) == (CHUNKS, LoadReason.COMPLETE), at
    else:
        assert (found, reason) in ((CHUNKS, LoadReason.COMPLETE), (DROPPED, LoadReason.GONE)), at
    return len(names)


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
