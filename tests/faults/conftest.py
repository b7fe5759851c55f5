"""Fixtures of the campaigns: how much to run, and one line at the end about each."""

import os
from collections.abc import Callable

import pytest

_LINES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep room for the lines."""
    config.stash[_LINES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the campaigns have found."""
    if config.stash[_LINES]:
        terminalreporter.section("campaigns")
        for line in config.stash[_LINES]:
            terminalreporter.write_line(line)


@pytest.fixture
def summary(request: pytest.FixtureRequest, seed: int) -> Callable[[str], None]:
    """Takes a campaign's line, which names its seed."""

    def tell(figures: str) -> None:
        request.config.stash[_LINES].append(f"{request.node.name}: {figures}, KVPOOL_SEED={seed}")

    return tell


@pytest.fixture(scope="session")
def is_whole() -> bool:
    """Whether the whole counts run, or a quick share."""
    return os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0")
