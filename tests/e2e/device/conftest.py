"""A daemon with memory of an emulated device for all tests of a module, with the options that it has as `OPTIONS`."""

from collections.abc import Iterator

import pytest

from tests.rigs.device import emulated
from tests.rigs.device.device_daemon import DeviceDaemon, ForkedDeviceDaemon
from tests.rigs.device.engine import use_emulated_driver


@pytest.fixture(scope="module")
def module_daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceDaemon]:
    """The module's daemon."""
    kind = getattr(request.module, "KIND", ForkedDeviceDaemon)
    with kind(tmp_path_factory.mktemp("daemon"), **getattr(request.module, "OPTIONS", {})) as daemon:
        daemon.wait_for_state("ok")
        yield daemon


@pytest.fixture
def daemon(module_daemon: DeviceDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceDaemon]:
    """The module's daemon, empty; engines of this process use its driver."""
    use_emulated_driver(monkeypatch)
    module_daemon.empty()
    yield module_daemon
    emulated.order("clear 1")
