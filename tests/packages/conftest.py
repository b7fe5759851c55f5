"""The files of dist/, and bare machines to try them on.

`make test-packages` builds the files and runs these checks. None of them skips: one that cannot check fails.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.packages.images import Image, build
from tests.packages.roots import COMMAND_S, SLEEP, TREE, Machine
from tests.packages.tools import tool

DIST = TREE / "dist"
WHEELS = TREE / "build/packages/wheels"
# For the Python of Debian 12, whatever this one is.
PLATFORM = ["--python-version=3.11", "--abi=cp311", "--abi=none", "--abi=abi3"]
PLATFORM += [f"--platform=manylinux{kind}_x86_64" for kind in ("_2_35", "_2_28", "_2_27", "_2_17", "2014")]


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


@pytest.fixture(scope="session")
def image(built: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image of packaging/Containerfile, of the wheel in dist/. Its machines have the wheels that pip wants, no network."""
    built("kvpool-*-cp311-cp311-*_x86_64.whl")
    download = [str(tool("python")), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += [
        "--only-binary=:all:",
        "--requirement",
        str(TREE / "packaging/debian/packages.txt"),
        "--dest",
        str(WHEELS),
    ]
    subprocess.run([*download, *PLATFORM], check=True, timeout=COMMAND_S)
    folder = tmp_path_factory.mktemp("image")
    with ExitStack() as machines:

        def start(release: str) -> Machine:
            return machines.enter_context(Machine(release, folder / f"stage-{len(list(folder.iterdir()))}"))

        def give_wheels(machine: Machine) -> None:
            for file in WHEELS.glob("*.whl"):
                machine.share_file(file)
            (machine.root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /packages\n")

        yield build(start, give_wheels)
