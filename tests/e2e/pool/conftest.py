"""Daemons that the tests of a module share, one of each write mode; each test has a namespace of its own there."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.layouts import CASES, Case
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.prompts import Ranks

__all__ = ["module_daemon", "module_daemons"]  # fixtures
# Of a call, a load or a save: none of them is to end by it.
TIMEOUT_S = 60.0
NUMBERS = count()


class Shared:
    """A daemon of others too, for one test."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self.daemon, self.model = daemon, model

    def connect(self, layout: kv.Layout = SMALL, **arguments: Any) -> kv.Pool:
        """A Pool in the test's namespace."""
        return self.daemon.connect(layout, **{"model": self.model, "timeout_s": TIMEOUT_S, **arguments})


@pytest.fixture
def shared(module_daemon: Daemon) -> Shared:
    return Shared(module_daemon, f"model-{next(NUMBERS)}")


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The row of the table of layouts that a test marked with `over` is run for."""
    return CASES[str(getattr(request, "param", "plain"))]


@pytest.fixture
def ranks(case: Case, shared: Shared) -> Iterator[Ranks]:
    """The ranks of the row, connected."""
    with Ranks(case, shared.connect) as made:
        yield made
