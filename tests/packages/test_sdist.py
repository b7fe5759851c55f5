"""The source distribution of dist/: it is the tree, and builds and runs with the oldest tools and packages that are named."""

import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvpool
from tests.packages.roots import TREE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Find = Callable[[str], Path]
BUILD_S = 1800
SERVE_S = 60


def _run(*words: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        list(map(str, words)),
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
    )


def _lowest(requirements: list[str]) -> list[str]:
    """The versions that lower bounds name, of the requirements that hold on this machine."""
    return [re.sub(r">=([\w.]+).*", r"==\1", one) for one in requirements if "python_version" not in one]


@pytest.fixture
def bare_environment(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True, timeout=120)
    return tmp_path / "environment"


def test_it_is_the_tree(built: Find) -> None:
    sdist = built("kvpool-*.tar.gz")
    root = f"kvpool-{kvpool.__version__}"
    assert sdist.name == f"{root}.tar.gz"
    with tarfile.open(sdist) as archive:
        found = {member.name.removeprefix(f"{root}/"): member for member in archive.getmembers() if not member.isdir()}
    listed = subprocess.run(["git", "ls-files"], cwd=TREE, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    assert set(found) == {*filter(None, listed), "PKG-INFO", "kvpool/_version.py"}
    assert {member.uname for member in found.values()} <= {"", "root"}


def test_without_a_compiler_a_line_says_so(built: Find, bare_environment: Path) -> None:
    pip = bare_environment / "bin/pip"
    ended = _run(pip, "install", "--no-deps", built("kvpool-*.tar.gz"), CXX="/nowhere/c++")
    assert ended.returncode != 0
    assert "no C++ compiler" in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "kvpool needs" in line]
    assert len(lines) == 1
    assert "g++" in lines[0]


@pytest.fixture
def lowest(built: Find, bare_environment: Path, tmp_path: Path) -> Iterator[Path]:
    """An environment with the lowest versions of all that is named, kvpool built there from its source."""
    with tarfile.open(built("kvpool-*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"kvpool-{kvpool.__version__}"
    named = tomllib.loads((source / "pyproject.toml").read_text())
    python = bare_environment / "bin/python"
    packages = _lowest(named["project"]["dependencies"] + named["project"]["optional-dependencies"]["daemon"])
    packages = [one.partition(";")[0] for one in packages]
    for words in (
        [*_lowest(named["build-system"]["requires"]), "cmake", "ninja"],
        ["--only-binary=:all:", *packages],
        ["--no-build-isolation", "--no-deps", str(source)],
    ):
        ended = _run(python, "-m", "pip", "install", *words)
        assert ended.returncode == 0, ended.stdout
    assert _run(python, "-m", "pip", "check").returncode == 0
    yield bare_environment
    shutil.rmtree(source)


def test_lower_bounds_are_enough(lowest: Path, tmp_path: Path) -> None:
    socket = tmp_path / "kvpool.sock"
    command = [str(lowest / "bin/kvpoold"), "--set", f"server.socket={socket}", "--set", "dram.capacity=16MiB"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as daemon:
        until = time.monotonic() + SERVE_S
        while not socket.exists() and daemon.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        stored = _run(lowest / "bin/python", "-I", TREE / "packaging/round_trip.py", socket)
        shown = _run(lowest / "bin/kvpoolctl", "--socket", socket, "info")
        daemon.terminate()
        log = daemon.communicate()[1]
    assert (stored.returncode, stored.stdout) == (0, ""), stored.stdout + log
    assert f"version:{kvpool.__version__}\n" in shown.stdout
