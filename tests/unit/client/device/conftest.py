"""An emulated device for each test."""

from collections.abc import Iterator

import pytest

import kvpool_native
from kvpool_client.copying.device.driver import open_device
from tests.rigs.device import emulated
from tests.rigs.device.engine import use_emulated_driver


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvpool_native.Device]:
    """The first one, with one of the driver's methods of copies. Nothing is left of what the test took."""
    use_emulated_driver(monkeypatch, getattr(request, "param", "batch"))
    yield open_device("cuda:0")
    emulated.order("clear 1")
