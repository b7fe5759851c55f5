"""Console scripts where the extra `daemon` is not installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli.launch import EXTRA

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
MODULES = {"prometheus-client": "prometheus_client", "pyzmq": "zmq"}


def _run(script: str, missing: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a console script in a Python that has no such module."""
    code = f"""
import sys
sys.modules[{missing!r}] = None
from kvpool.cli.launch import {script}
sys.argv[0] = {script!r}
{script}()
"""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("script", "missing", "arguments"),
    [
        ("kvpoold", "click", ()),
        ("kvpoold", "uvloop", ("--check",)),
        ("kvpoolctl", "click", ("info",)),
    ],
)
def test_one_line_names_the_extra(script: str, missing: str, arguments: tuple[str, ...]) -> None:
    ended = _run(script, missing, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(rf"{script}: {missing} is not installed: .* extra daemon.*\n", ended.stderr)


def test_another_module_that_lacks_is_a_fault_of_ours() -> None:
    ended = _run("kvpoold", "kvpool.cli.serving")
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr


def test_all_modules_of_the_extra_are_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[>=<;]", one)[0].strip() for one in extras["daemon"]]
    assert {MODULES.get(name, name) for name in names} == EXTRA
    assert extras.keys().isdisjoint({"test", "lint"})
