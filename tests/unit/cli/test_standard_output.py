"""Commands whose standard output cannot be written: one line and exit code 1, at a write or at the last flush."""

import os
import subprocess
import sys

import pytest


def _run(arguments: list[str], *, unbuffered: str, stdout: int | None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "kvpool_tools.cli.kvpoolctl", *arguments]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=60,
        check=False,
        preexec_fn=(lambda: os.close(1)) if stdout is None else None,
    )


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["--help"], ""),
        pytest.param(["--help"], "1", marks=pytest.mark.slow),
        pytest.param(["--version"], "", marks=pytest.mark.slow),
        (["--version"], "1"),
    ],
)
def test_a_full_disk_is_one_line_and_a_failure(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = _run(arguments, unbuffered=unbuffered, stdout=full.fileno())
    assert done.stderr == "kvpoolctl: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_closed_descriptor_is_one_line_and_a_failure() -> None:
    done = _run(["--help"], unbuffered="", stdout=None)
    assert (done.returncode, done.stderr) == (1, "kvpoolctl: standard output is closed\n")


def test_a_closed_pipe_ends_without_an_error_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = _run(["--help"], unbuffered="", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
