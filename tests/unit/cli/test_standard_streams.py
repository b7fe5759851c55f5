"""Commands whose standard output or error cannot be written: one line and exit code 1, at a write or at the last flush; the
command's own code where only messages are lost."""

import os
import subprocess
import sys

import pytest

MODULES = {"kvpoold": "kvpool.cli.kvpoold", "kvpoolctl": "kvpool_tools.cli.kvpoolctl"}
# What prints and ends by itself.
PRINTING = [
    ["kvpoolctl", "--help"],
    ["kvpoolctl", "--version"],
    ["kvpoold", "--help"],
    ["kvpoold", "--version"],
    ["kvpoold", "--print-config"],
    ["kvpoold", "--check", "--set", "dram.capacity=64KiB"],
]


def _run(words: list[str], *, redirect: str = "", **changed: str) -> "subprocess.CompletedProcess[str]":
    """A command from a shell with a redirection, in an environment with changes."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **changed}
    name, *arguments = words
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", MODULES[name], *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, timeout=60, check=False
    )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_full_disk_is_one_line_and_a_failure(words: list[str], unbuffered: str) -> None:
    done = _run(words, PYTHONUNBUFFERED=unbuffered, redirect=">/dev/full")
    assert done.stderr == f"{words[0]}: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", PRINTING[::2], ids=" ".join)
def test_a_closed_descriptor_is_one_line_and_a_failure(words: list[str]) -> None:
    done = _run(words, redirect=">&-")
    assert (done.returncode, done.stderr) == (1, f"{words[0]}: standard output is closed\n")


@pytest.mark.parametrize("words", PRINTING[::2], ids=" ".join)
def test_a_closed_pipe_ends_without_an_error_line(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "words",
    [
        ["kvpoold", "--check", "--set", "dram.capacity=64KiB", "--set", "server.socket=/tmp/größe-€/kvpool.sock"],
        ["kvpoold", "--print-config"],
        ["kvpoolctl", "why", "--help"],
    ],
    ids=" ".join,
)
def test_a_character_that_the_terminal_lacks_ends_no_command(words: list[str], encoding: str) -> None:
    done = _run(words, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
def test_who_prints_nothing_ends_with_its_own_code(redirect: str) -> None:
    done = _run(["kvpoold", "--set", "log.level=loud"], redirect=redirect)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["kvpoold", "--set", "log.level=loud"], 2),
        (["kvpoold", "--none"], 2),
        (["kvpoolctl", "--socket", "/nowhere/kvpool.sock", "info"], 3),
        (["kvpoolctl", "none"], 2),
    ],
)
def test_a_message_that_cannot_be_written_changes_no_exit_code(words: list[str], code: int, redirect: str) -> None:
    assert _run(words, redirect=redirect).returncode == code
