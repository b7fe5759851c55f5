"""One daemon for all tests of this folder: each finds it alive and empty, whatever the one before has done to it."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from tests.rigs.daemon import Daemon

with contextlib.suppress(pytest.skip.Exception):  # tests of scripted engines are skipped where torch is not
    from tests.rigs.vllm.setting import start

__all__ = ["start"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Scripted engines need torch."""
    if "start" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.torch)


# Of the daemon's statistics: what a test's engines may have left when they are closed.
LEFT = ("dram.chunks", "leases", "tickets", "reservations")


@pytest.fixture(scope="session")
def folders_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as started:
        yield started
        assert started.problems() == []


@pytest.fixture
def daemon(folders_daemon: Daemon) -> Iterator[Daemon]:
    """This folder's daemon; a test may stop or kill it. Its counters and its events go on from test to test."""
    yield folders_daemon
    folders_daemon.signal(signal.SIGCONT)
    if not folders_daemon.is_running:
        folders_daemon.start()
    elif not is_emptied(folders_daemon):
        start_anew(folders_daemon)  # a ticket that nobody claims holds its chunks for long
    try:
        folders_daemon.assert_no_errors()
    finally:
        folders_daemon.forgive_logged_errors()  # they have failed the test that they came in


@pytest.fixture
def new_daemon(daemon: Daemon) -> Daemon:
    """This folder's daemon, started anew: it has counted nothing and has no events."""
    start_anew(daemon)
    return daemon


def start_anew(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def is_emptied(daemon: Daemon) -> bool:
    """Drop all chunks; whether nothing is left."""
    with daemon.admin() as admin:
        admin.flush(None, None)
    stats = daemon.stats()
    return not any(stats[name] for name in LEFT)
