"""The files of dist/, and bare machines to try them on.

`make test-packages` builds the files and runs these checks. None of them skips: one that cannot check fails.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.packages.roots import SLEEP, TREE, Machine

DIST = TREE / "dist"


@pytest.fixture(autouse=True)
def as_root() -> None:
    """Machines are made of namespaces and layers."""
    assert os.geteuid() == 0, "the checks of packages need root: namespaces, overlays, debootstrap"


@pytest.fixture(scope="session")
def built() -> Callable[[str], Path]:
    """The one file of dist/ that a pattern names."""

    def find(pattern: str) -> Path:
        found = sorted(DIST.glob(pattern))
        assert len(found) == 1, (
            f"{len(found)} files in dist/ match {pattern}, expected one: make test-packages builds them"
        )
        return found[0]

    return find


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Makes bare machines of a release, which end with the test; the second argument is their first process."""
    with ExitStack() as machines:
        count = 0

        def start(release: str = "bookworm", first: str = SLEEP) -> Machine:
            nonlocal count
            count += 1
            return machines.enter_context(Machine(release, tmp_path / f"machine-{count}", first))

        yield start
