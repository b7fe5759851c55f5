"""Scripts of `make test-rdma`, with a program in the emulator's place: exit codes, and that nothing goes on after their end."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.daemon import wait_until

SCRIPTS = Path(__file__).parents[3] / "scripts/rdma-machine"
TIME_S = 120.0
NEEDED = ("sh", "setpriv", "timeout", "getconf", "mktemp", "mkfifo")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
# The host's directory of the machine is among its arguments; it notes its process there as qemu does.
EMULATOR = """#!/bin/sh
for word in "$@"; do case "$word" in local,id=machine,path=*) share=${{word#*path=}} ;; esac; done
share=${{share%%,*}}
echo $$ >"$share/pid"
echo $$ >{pid}
{work}
"""

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"missing: {' '.join(MISSING)}")

Started = Callable[[str, int], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Started:
    """Begins `run` with an emulator that does this, for so many seconds at most."""
    (tmp_path / "bin").mkdir()

    def begin(work: str, seconds: int) -> "subprocess.Popen[str]":
        emulator = tmp_path / "bin/qemu-system-x86_64"
        emulator.write_text(EMULATOR.format(pid=tmp_path / "pid", work=work))
        emulator.chmod(0o755)
        return subprocess.Popen(
            ["sh", str(SCRIPTS / "run"), str(tmp_path), str(seconds), "true"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        )

    return begin


def is_over(tmp_path: Path) -> bool:
    """Whether the emulator has begun, and has ended."""
    pid = (tmp_path / "pid").read_text().strip()
    return not Path(f"/proc/{pid}").exists()


def test_the_machines_exit_code_and_stamped_output_are_passed_on(tmp_path: Path, start: Started) -> None:
    process = start('echo hello; printf unfinished; echo 7 >"$share/status"', 100)
    output, _ = process.communicate(timeout=TIME_S)
    assert process.returncode == 7
    assert re.fullmatch(r"(\[ +\d+ s, cpu +\d+ s\] (hello|unfinished)\n){2}", output)
    assert not list(tmp_path.glob("tmp.*")), "its directory is gone"


def test_a_machine_without_a_result_has_failed(start: Started) -> None:
    process = start("exit 0", 100)
    _, errors = process.communicate(timeout=TIME_S)
    assert process.returncode == 125
    assert "no result; qemu ended with exit code 0" in errors


def test_a_machine_that_is_not_done_in_time_is_ended(tmp_path: Path, start: Started) -> None:
    process = start("exec sleep 600", 1)
    _, errors = process.communicate(timeout=TIME_S)
    assert process.returncode == 124
    assert "not done within 1 s" in errors
    assert is_over(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_machine_outlives_the_script(tmp_path: Path, start: Started, how: signal.Signals) -> None:
    process = start("exec sleep 600", 100)
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "it runs", TIME_S)
    process.send_signal(how)
    process.communicate(timeout=TIME_S)
    assert process.returncode == (130 if how is not signal.SIGKILL else -9)
    wait_until(lambda: is_over(tmp_path), "it has ended", TIME_S)
