"""The version of a build: counted by git, written in a source distribution, and ordered as pip and apt order it."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[3] / "packaging" / "build_version.py"


@pytest.fixture(scope="module")
def find_version() -> Callable[[Path], str]:
    spec = importlib.util.spec_from_file_location("build_version", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Path], str] = module.find_version
    return found


def _git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    ended = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True)
    return ended.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of three commits."""
    folder = tmp_path / "clone"
    folder.mkdir()
    _git(folder, "init", "-q")
    for number in range(3):
        (folder / "file").write_text(str(number))
        _git(folder, "add", "file")
        _git(folder, "commit", "-qm", "a change")
    return folder


def test_each_commit_is_newer_than_the_one_before_and_older_than_the_release(
    clone: Path, find_version: Callable[[Path], str]
) -> None:
    commit = _git(clone, "rev-parse", "--short=9", "HEAD")
    assert find_version(clone) == f"0.1.0.dev3+g{commit}"
    (clone / "file").write_text("edited")
    assert find_version(clone) == f"0.1.0.dev3+g{commit}.dirty"
    _git(clone, "checkout", "-q", "file")
    _git(clone, "tag", "v0.1.0")
    assert find_version(clone) == "0.1.0"


def test_a_clone_without_all_commits_counts_none(
    clone: Path, tmp_path: Path, find_version: Callable[[Path], str]
) -> None:
    _git(tmp_path, "clone", "-q", "--depth=1", f"file://{clone}", "shallow")
    assert find_version(tmp_path / "shallow") == f"0.1.0.dev0+g{_git(clone, 'rev-parse', '--short=9', 'HEAD')}"


def test_a_source_distribution_keeps_its_version_wherever_it_is_unpacked(
    clone: Path, tmp_path: Path, find_version: Callable[[Path], str]
) -> None:
    unpacked = clone / "kvpool"
    unpacked.mkdir()
    assert find_version(unpacked) == "0.1.0.dev0"
    (unpacked / "PKG-INFO").write_text(
        "Metadata-Version: 2.4\nName: kvpool\nVersion: 0.1.0.dev7+gabc\n\nVersion: none\n"
    )
    assert find_version(unpacked) == "0.1.0.dev7+gabc"


def test_a_folder_without_git_is_older_than_everything(
    tmp_path: Path, find_version: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_version(tmp_path) == "0.1.0.dev0"
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_version(tmp_path) == "0.1.0.dev0"
