"""One daemon for all tests of a module that leave nothing behind, and one more in the other write mode.

A module imports both fixtures. Tests share the daemon's memory: each has keys of its own, by its tokens or its model, and
whoever kills, fills or counts a daemon starts one of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.rigs.daemon import WRITE_MODES, Daemon

__all__ = ["module_daemon", "module_daemons"]


@pytest.fixture(scope="module")
def module_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Daemon]]:
    """The module's daemon of a write mode, started when it is first asked for; checked at the end."""
    started: dict[str, Daemon] = {}
    with ExitStack() as stack:

        def daemon_of(write_mode: str) -> Daemon:
            if write_mode not in started:
                directory = tmp_path_factory.mktemp(f"daemon-{write_mode}")
                started[write_mode] = stack.enter_context(Daemon(directory, **WRITE_MODES[write_mode]))
            return started[write_mode]

        yield daemon_of
        for daemon in started.values():
            assert daemon.problems() == []


@pytest.fixture
def module_daemon(module_daemons: Callable[[str], Daemon], write_mode: str) -> Daemon:
    """The module's daemon, in the test's write mode."""
    return module_daemons(write_mode)
