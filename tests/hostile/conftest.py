"""Fixtures of the hostile tests: how much to run, and a daemon that a module's tests share."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.daemon import Daemon


@dataclass(frozen=True, slots=True)
class Campaign:
    """How much is sent. The whole counts run with KVPOOL_CAMPAIGN=1, a quick share without."""

    is_whole: bool

    def pick(self, quick: int, whole: int) -> int:
        """The count that is wanted."""
        return whole if self.is_whole else quick


@pytest.fixture(scope="session")
def campaign() -> Campaign:
    """Whole or quick."""
    return Campaign(os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0"))


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for tests that leave nothing behind."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        assert daemon.problems() == []
