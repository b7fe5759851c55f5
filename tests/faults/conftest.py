"""Fixtures of the campaigns: how much to run, and one line at the end about each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import fault_filesystem as faulty

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
def fault_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the fault file system, built once."""
    return faulty.build(tmp_path_factory.mktemp("faultfs"))


@pytest.fixture
def fault_filesystem(fault_program: Path, tmp_path: Path) -> Iterator[faulty.FaultFilesystem]:
    """A mount that fails when it is told to."""
    directory = tmp_path / "faulty"
    directory.mkdir()
    filesystem = faulty.FaultFilesystem(fault_program, directory)
    try:
        yield filesystem
    finally:
        filesystem.unmount()
