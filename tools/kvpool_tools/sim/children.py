"""Child processes that a benchmark starts, and that never outlive it.

A child is bound to this process before it runs its command: the kernel sends it SIGTERM when this process ends, in any way. It
has a session of its own, so that Ctrl-C reaches only this process, which then stops its children in order. Main thread of a
command only: the kernel binds a child to the thread that started it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

STOP_TIMEOUT_S = 30.0

# Asks for the signal, makes sure that the parent did not end before that, and becomes the command.
LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start_bound(
    module: str,
    arguments: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run one of our modules as a child that ends with this process at the latest."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
    command = [*launcher, sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True)  # noqa: S603 - our own module


def stop(process: "subprocess.Popen[bytes]", timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End a child: SIGTERM, and SIGKILL when it has not ended in time. Idempotent."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
        process.wait(timeout_s)
    if process.poll() is None:
        process.kill()
        process.wait()
