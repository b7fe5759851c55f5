"""Tests of samples of long suites: no test is left out whole, and a seed draws the same again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.runs.sampling import drawn

ROOT = Path(__file__).parents[3]

SUITE = """
import pytest

@pytest.mark.parametrize("number", range(9))
def test_many(number):
    pass

def test_one():
    pass
"""


def _run(directory: Path, sample: str, seed: str = "", workers: int = 0) -> subprocess.CompletedProcess[str]:
    file = directory / "test_suite.py"
    file.write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.rigs.runs.sampling",
        "-p",
        "no:cacheprovider",
        f"-n{workers}",
        "-rA",
        str(file),
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "KVPOOL_SAMPLE": sample, "KVPOOL_SEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _passed(run: subprocess.CompletedProcess[str]) -> set[str]:
    return {line for line in run.stdout.splitlines() if line.startswith("PASSED")}


def test_each_test_keeps_a_case() -> None:
    names = [f"a::many[{number}]" for number in range(10)] + ["a::one", "b::many[x]"]
    for seed in range(20):
        chosen = drawn(names, 4, seed)
        assert {"a::one", "b::many[x]"} <= chosen
        assert len(chosen) == 3 + 2
    assert drawn(names, 1, 0) == set(names)


@pytest.mark.slow
def test_a_seed_draws_the_same_sample_again_and_is_printed(tmp_path: Path) -> None:
    first = _run(tmp_path, "3", "7")
    assert first.returncode == 0, first.stdout
    assert "KVPOOL_SEED=7" in first.stdout
    assert len(_passed(first)) == 4
    assert _passed(_run(tmp_path, "3", "7")) == _passed(first)
    assert len(_passed(_run(tmp_path, ""))) == 10


@pytest.mark.slow
def test_workers_run_one_sample_together(tmp_path: Path) -> None:
    shared = _run(tmp_path, "3", "7", workers=2)
    assert shared.returncode == 0, shared.stdout
    assert _passed(shared) == _passed(_run(tmp_path, "3", "7"))
    drawn_anew = _run(tmp_path, "3", workers=2)
    assert drawn_anew.returncode == 0, drawn_anew.stdout
    assert len(_passed(drawn_anew)) == 4


def test_an_invalid_sample_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path, "half")
    assert run.returncode != 0
    assert "KVPOOL_SAMPLE=half: expected a whole number from 1 on" in run.stderr
