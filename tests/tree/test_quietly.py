"""scripts/quietly: what it shows of a command, its exit code, and an interrupt that ends all that the command has started."""

import signal
import subprocess
from pathlib import Path

from tests.rigs.daemon import wait_until

QUIETLY = Path(__file__).parents[2] / "scripts/quietly"
STARTS = 'sleep 600 & echo $! >"$0"; wait'


def test_a_failure_is_shown_with_its_output_and_exit_code() -> None:
    run = subprocess.run(
        [QUIETLY, "building", "sh", "-c", "echo noise; exit 3"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (3, "building\n")
    assert run.stderr == "noise\nbuilding: failed with exit code 3\n"


def test_what_succeeds_prints_no_noise() -> None:
    run = subprocess.run([QUIETLY, "building", "echo", "noise"], capture_output=True, text=True, timeout=60, check=True)
    assert "noise" not in run.stdout + run.stderr


def test_an_interrupt_ends_what_the_command_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen([QUIETLY, "building", "sh", "-c", STARTS, file], stdout=subprocess.DEVNULL) as run:
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the command has started another")
        started = Path("/proc") / file.read_text().strip()
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    wait_until(lambda: _has_ended(started), "that has ended too")


def _has_ended(process: Path) -> bool:
    try:
        return "\nState:\tZ" in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between any two looks
        return True
