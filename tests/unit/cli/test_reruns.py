"""Tests of second runs: they accept timeouts, and never a wrong result."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.runs.reruns import is_unforgivable

ROOT = Path(__file__).parents[3]

FAILS_ONCE = """
from pathlib import Path

def test_it():
    mark = Path(__file__).with_suffix(".mark")
    has_run, _ = mark.exists(), mark.touch()
    {statement}
"""


def _run(directory: Path, statement: str) -> subprocess.CompletedProcess[str]:
    file = directory / "test_fails_once.py"
    file.write_text(FAILS_ONCE.format(statement=statement))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.rigs.runs.reruns",
        "-p",
        "no:cacheprovider",
        "--reruns",
        "1",
        str(file),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_timeout_failure_runs_once_more_and_stays_in_the_output(tmp_path: Path) -> None:
    run = _run(tmp_path, "assert has_run, 'waited 5 s'")
    assert run.returncode == 0, run.stdout
    assert "ran once more" in run.stdout
    assert "waited 5 s" in run.stdout


def test_wrong_bytes_fail_the_run_even_if_the_second_run_passes(tmp_path: Path) -> None:
    run = _run(tmp_path, "wrong_bytes = not has_run; assert not wrong_bytes")
    assert run.returncode == 1, run.stdout
    assert "not forgiven" in run.stdout
    assert "1 passed" in run.stdout


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    assert _run(tmp_path, "assert False, 'never'").returncode == 1


@pytest.mark.parametrize(
    "line",
    ["E   AssertionError: 3 wrong bytes", ">       assert not is_dead(daemon), daemon.log()", "E   died of SIGSEGV"],
)
def test_unforgivable_failures_are_recognised_by_their_words(line: str) -> None:
    assert is_unforgivable(f"    chunk = 3\n{line}\n")
    assert not is_unforgivable(line[1:])


@pytest.mark.parametrize(
    "found", ["AssertionError: not within 30.0 s: stored", "TimeoutError", "subprocess.TimeoutExpired: SIGTERM"]
)
def test_a_wait_that_ran_out_is_forgiven_whatever_was_waited_for(found: str) -> None:
    waited = f">       wait_until(lambda: payload_of(keys) == expected)\nE       {found}\n"
    assert not is_unforgivable(waited)
    assert is_unforgivable(waited + "E       died of SIGSEGV\n")


def test_what_a_failure_quotes_of_a_log_is_no_finding() -> None:
    quoted = "E       2026-01-02T03:04:05.678+0000 INFO kvpool.server.app stopped by signal: 0 chunks written down\n"
    assert not is_unforgivable(
        f">       wait_until(lambda: is_open(daemon))\nE       AssertionError: closed: a log\n{quoted}"
    )
    assert is_unforgivable(f">       check(daemon)\nE       AssertionError: 3 wrong bytes\n{quoted}")


def test_wrong_bytes_are_not_forgiven_because_a_wait_ran_out_after_them() -> None:
    chained = (
        ">       assert tally.wrong == []\nE       AssertionError\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        ">       wait_until(lambda: has_ended(daemon))\nE       AssertionError: not within 1.0 s: it has ended\n"
    )
    assert is_unforgivable(chained)
    assert not is_unforgivable(chained.replace("tally.wrong == []", "left == 0"))
