"""Tests of verdicts on a sample of campaigns: wrong bytes, lost chunks and crashes fail a run, a late machine does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.runs.verdicts import is_fault

ROOT = Path(__file__).parents[3]


def _run(directory: Path, statement: str, fail_on: str = "faults") -> subprocess.CompletedProcess[str]:
    file = directory / "test_statement.py"
    file.write_text(f"import os\n\ndef test_it():\n    {statement}\n")
    plugins = ("-p", "tests.rigs.runs.sampling", "-p", "tests.rigs.runs.verdicts", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, str(file)],
        cwd=ROOT,
        env={**os.environ, "KVPOOL_FAIL_ON": fail_on, "KVPOOL_SEED": "7"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_failure_that_is_no_fault_is_reported_and_fails_no_campaign(tmp_path: Path) -> None:
    run = _run(tmp_path, "assert False, 'not within 30 s: stored'")
    assert run.returncode == 0, run.stdout
    assert "::test_it: reported only" in run.stdout
    assert "KVPOOL_SEED=7" in run.stdout
    assert _run(tmp_path, "assert False, 'not within 30 s: stored'", fail_on="").returncode == 1


def test_wrong_bytes_fail_a_campaign(tmp_path: Path) -> None:
    run = _run(tmp_path, "wrong_bytes = 3; assert not wrong_bytes")
    assert run.returncode == 1, run.stdout
    assert "::test_it: FAULT: the run fails" in run.stdout


def test_an_unknown_verdict_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path, "pass", fail_on="all")
    assert run.returncode not in (0, 1)
    assert "KVPOOL_FAIL_ON=all: expected nothing, or faults" in run.stderr


@pytest.mark.parametrize(
    "line",
    [
        *("E   AssertionError: 3 wrong bytes", ">       assert not is_dead(daemon), daemon.log()"),
        *("E   died of SIGSEGV", "E   AssertionError: an acknowledged chunk is lost"),
        "E   AssertionError: the daemon has logged an error of its own:",
        *(">       assert torch.equal(found, right), what", "E   AssertionError: other bytes in a page of swa"),
    ],
)
def test_faults_are_recognised_by_their_words(line: str) -> None:
    assert is_fault(f"    chunk = 3\n{line}\n")
    assert not is_fault(line[1:])


def test_a_process_of_tests_that_died_is_a_fault() -> None:
    assert is_fault("worker 'gw1' crashed while running 'tests/unit/client/test_load.py::test_it'")


@pytest.mark.parametrize(
    "found", ["AssertionError: not within 30.0 s: stored", "TimeoutError", "subprocess.TimeoutExpired: SIGTERM"]
)
def test_a_wait_that_ran_out_is_no_fault_whatever_was_waited_for(found: str) -> None:
    waited = f">       wait_until(lambda: payload_of(keys) == expected)\nE       {found}\n"
    assert not is_fault(waited)
    assert is_fault(waited + "E       died of SIGSEGV\n")


def test_what_a_failure_quotes_of_a_log_is_no_finding() -> None:
    quoted = "E       2026-01-02T03:04:05.678+0000 INFO kvpool.server.app stopped by signal: 0 chunks written down\n"
    assert not is_fault(f">       wait_until(lambda: is_open(daemon))\nE       AssertionError: closed: a log\n{quoted}")
    assert is_fault(f">       check(daemon)\nE       AssertionError: 3 wrong bytes\n{quoted}")


def test_a_wait_that_ran_out_behind_wrong_bytes_hides_no_fault() -> None:
    chained = (
        ">       assert tally.wrong == []\nE       AssertionError\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        ">       wait_until(lambda: has_ended(daemon))\nE       AssertionError: not within 1.0 s: it has ended\n"
    )
    assert is_fault(chained)
    assert not is_fault(chained.replace("tally.wrong == []", "left == 0"))
