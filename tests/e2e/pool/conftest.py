"""Daemons that the tests of a module share, one of each write mode; each test has a namespace of its own there."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, WRITE_MODES, Daemon

# Of a call, a load or a save: none of them is to end by it.
TIMEOUT_S = 30.0
NUMBERS = count()


class Shared:
    """A daemon of others too, for one test."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self.daemon, self.model = daemon, model

    def connect(self, layout: kv.Layout = SMALL, **arguments: Any) -> kv.Pool:
        """A Pool in the test's namespace."""
        return self.daemon.connect(layout, **{"model": self.model, "timeout_s": TIMEOUT_S, **arguments})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """A daemon of each write mode, begun before a test changes the environment: so they are forked."""
    with ExitStack() as stack:
        daemons = {
            mode: stack.enter_context(Daemon(tmp_path_factory.mktemp(mode), **options))
            for mode, options in WRITE_MODES.items()
        }
        yield daemons
        assert {mode: daemon.problems() for mode, daemon in daemons.items()} == {mode: [] for mode in WRITE_MODES}


@pytest.fixture
def shared(started: dict[str, Daemon], write_mode: str) -> Shared:
    return Shared(started[write_mode], f"model-{next(NUMBERS)}")
