"""Fixtures of the campaigns: how much to run, and one line at the end about each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CAMPAIGN_LINE
from tests.faults.rigs import fault_filesystem as faulty


@pytest.fixture
def summary(request: pytest.FixtureRequest, seed: int) -> Callable[[str], None]:
    """Takes a campaign's line, which names its seed."""

    def report(figures: str) -> None:
        line = f"{request.node.name}: {figures}, KVPOOL_SEED={seed}"
        request.node.user_properties.append((CAMPAIGN_LINE, line))

    return report


@pytest.fixture(scope="session")
def fault_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the fault file system, built once."""
    return faulty.build(tmp_path_factory.mktemp("faultfs"))


@pytest.fixture
def fault_filesystem(fault_program: Path, tmp_path: Path) -> Iterator[faulty.FaultFilesystem]:
    """A mount that fails on command."""
    directory = tmp_path / "faulty"
    directory.mkdir()
    filesystem = faulty.FaultFilesystem(fault_program, directory)
    try:
        yield filesystem
    finally:
        filesystem.unmount()
