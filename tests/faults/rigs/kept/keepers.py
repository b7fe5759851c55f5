"""Keepers of tests' daemons: processes of their own, which a test ends, since no daemon does."""

import contextlib
import os
import re
import signal
from pathlib import Path

from tests.rigs.daemon import Daemon, wait_until

# Of a daemon with a keeper of its own, which ends soon after a test that has failed.
KEPT = {"server__keep_memory": "keeper", "server__keep_for": "60s"}


def keeper_of(daemon: Daemon) -> int:
    """The keeper's process."""
    wait_until(lambda: _found(daemon) > 0, "the daemon's memory is kept")
    return _found(daemon)


def end_keeper(pid: int) -> None:
    """SIGKILL, and until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _lives(pid), "the keeper has ended")


def _found(daemon: Daemon) -> int:
    found = re.search(r"process (\d+)", str(daemon.info()["dram_kept_by"]))
    return int(found.group(1)) if found else 0


def _lives(pid: int) -> bool:
    """Whether the process is there and no zombie: nobody may be there who waits for it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
