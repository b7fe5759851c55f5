"""A release: each file has its sum, what of others is in it is in the bill, and another folder makes the same bytes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kvpool
from tests.packages.conftest import DIST
from tests.packages.roots import TREE
from tests.packages.tools import ask

Find = Callable[[str], Path]
RELEASE_S = 5400
VALIDATE = """
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(json.dumps(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(question) or "")))
"""


def _sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file by name, as SHA256SUMS has it."""
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def test_every_file_has_its_sum_and_the_version(built: Find) -> None:
    named = _sums(DIST)
    assert set(named) == {file.name for file in DIST.iterdir()} - {"SHA256SUMS"}
    assert len([name for name in named if name.endswith(".whl")]) == 6
    kinds = ("kvpool-*.tar.gz", "kvpool_*.deb", "kvpool-*.tgz", "kvpool-*.cdx.json", "CHANGELOG.md")
    assert {built(kind).name for kind in kinds} < set(named)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=DIST, check=True, timeout=60)
    python_files = {name for name in named if name.endswith((".whl", ".tar.gz", ".json"))}
    assert all(name.startswith(f"kvpool-{kvpool.__version__}") for name in python_files)


def test_the_bill_is_valid_and_names_what_the_package_has(built: Find) -> None:
    text = built("kvpool-*.cdx.json").read_text()
    assert ask(VALIDATE, text) == ""
    bill = json.loads(text)
    listed = {(part["name"].lower(), part["version"]) for part in bill["components"]}
    shown = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", built("kvpool_*.deb")], check=True, capture_output=True, timeout=120
    )
    files = subprocess.run(["tar", "--list"], input=shown.stdout, check=True, capture_output=True, timeout=120)
    infos = re.findall(r"site-packages/([^/\n]+)-([^/\n-]+)\.dist-info/METADATA", files.stdout.decode())
    packaged = {(name.lower().replace("_", "-"), version) for name, version in infos}
    assert {name for name, _ in packaged} >= {"kvpool", "msgpack", "numpy", "uvloop", "urllib3"}
    assert {(name, version) for name, version in packaged if name != "kvpool"} <= listed
    assert {name for name, _ in listed} >= {"liburing", "nanobind", "ziglang"}
    assert bill["metadata"]["component"]["version"] == kvpool.__version__


def test_another_folder_makes_the_same_bytes(tmp_path: Path) -> None:
    """A clone with no build in it, at a longer path, under another umask."""
    other = tmp_path / "another" / "folder"
    subprocess.run(["git", "clone", "--quiet", TREE, other], check=True, timeout=120)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHONPATH"))}
    ended = subprocess.run(
        ["sh", "-c", f"umask 027; exec make release PYTHON={sys.executable}"],
        cwd=other,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RELEASE_S,
    )
    assert ended.returncode == 0, ended.stdout
    assert _sums(other / "dist") == _sums(DIST)
