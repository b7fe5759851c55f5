"""Tests of runs with a limit on their time: what begins too late is skipped and counted, and every worker draws one order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SLOW = """
from tests.rigs.runs.time_limit import DEADLINE_S

def test_first(request):
    request.config.stash[DEADLINE_S] -= 300  # all the time of the run has passed

def test_second():
    pass
"""
QUICK = """
def test_only():
    pass
"""


def _run(directory: Path, limit: str, *options: str, seed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.rigs.runs.sampling", "-p", "tests.rigs.runs.time_limit"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-ra", "-v", *options, str(directory)],
        cwd=ROOT,
        env={**os.environ, "KVPOOL_TIME_S": limit, "KVPOOL_SEED": seed, "KVPOOL_SAMPLE": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _order(run: subprocess.CompletedProcess[str]) -> list[str]:
    return [
        line.split("::")[0].split("/")[-1] for line in run.stdout.splitlines() if "::" in line and " PASSED" in line
    ]


def test_what_begins_too_late_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    limited = _run(tmp_path, "300")
    assert limited.returncode == 0, limited.stdout
    assert "1 passed, 1 skipped" in limited.stdout
    assert "not begun within the 300 s of this run (KVPOOL_TIME_S)" in limited.stdout


@pytest.mark.slow
def test_files_come_in_an_order_that_a_seed_draws_again(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text(QUICK)
    orders = [_order(_run(tmp_path, "60", seed=seed)) for seed in ("5", "5", "6")]
    assert sorted(orders[0]) == sorted(orders[2]) == [f"test_{number}.py" for number in range(8)]
    assert orders[0] == orders[1] != orders[2]
    together = _run(tmp_path, "60", "-n2", seed="5")
    assert together.returncode == 0, together.stdout
    assert "8 passed" in together.stdout


@pytest.mark.parametrize("limit", ["soon", *(pytest.param(limit, marks=pytest.mark.slow) for limit in ("-1", "1.5"))])
def test_an_invalid_limit_is_refused(limit: str, tmp_path: Path) -> None:
    run = _run(tmp_path, limit)
    assert run.returncode != 0
    assert f"KVPOOL_TIME_S={limit}: expected a whole number of seconds" in run.stderr
