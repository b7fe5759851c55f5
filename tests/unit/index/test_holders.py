"""Holders: what is proven about the end of a process, and what is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.index.holders import Process, has_ended, process_of


@pytest.fixture
def sleeper() -> "subprocess.Popen[bytes]":
    """A process that runs until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def _end(sleeper: "subprocess.Popen[bytes]") -> None:
    sleeper.kill()
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    sleeper.wait()


def test_a_process_that_runs_has_not_ended_and_a_reaped_one_has(sleeper: "subprocess.Popen[bytes]") -> None:
    found = process_of(sleeper.pid)
    assert found.start > 0
    assert not has_ended(found)
    _end(sleeper)
    assert has_ended(found)
    assert has_ended(Process(sleeper.pid))


def test_one_that_nobody_has_waited_for_has_ended(sleeper: "subprocess.Popen[bytes]") -> None:
    found = process_of(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert has_ended(found, 60.0)
    assert Path(f"/proc/{sleeper.pid}").exists()
    _end(sleeper)


def test_a_number_that_is_used_again_is_another_process(sleeper: "subprocess.Popen[bytes]") -> None:
    found = process_of(sleeper.pid)
    assert has_ended(Process(sleeper.pid, found.start - 1))
    _end(sleeper)


def test_a_hidden_process_is_believed_to_run(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    hidden = process_of(sleeper.pid, tmp_path)
    assert hidden == Process(sleeper.pid)
    assert not has_ended(hidden)
    _end(sleeper)
    assert has_ended(hidden)


def test_the_start_is_read_behind_any_name(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(3, 53))
    (tmp_path / "7" / "stat").write_text(f"7 (a) R 1 2) S {fields}")
    assert process_of(7, tmp_path) == Process(7, 21)
    (tmp_path / "7" / "stat").write_text("7 (cut off) S 1 2")
    assert process_of(7, tmp_path) == Process(7)


def test_a_process_of_another_namespace_is_nobody_here_and_is_believed_to_run() -> None:
    unseen = process_of(0)
    assert unseen == Process(0)
    assert not has_ended(unseen)
