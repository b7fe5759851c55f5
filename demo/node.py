"""The processes of the demonstration: a daemon on a socket of its own, and workers that are asked and read line by line.

Every wait has a deadline and every process an end: leaving the context stops what still runs. One thread, and a timer
for each worker.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpool.clock import Deadline

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
WORKER_TIMEOUT_S = 300.0


class ProcessFailed(Exception):
    """A process of the demonstration did not do its part; carries its last words."""


@contextmanager
def running_daemon(directory: Path, capacity: str) -> Iterator[Path]:
    """A daemon with the built-in defaults; the path of its socket. SIGTERM ends it, and it has to end with exit code 0."""
    socket, log = directory / "kvpool.sock", directory / "kvpoold.log"
    command = [
        *(sys.executable, "-m", "kvpool.cli.kvpoold"),
        f"--set=server.socket={socket}",
        f"--set=dram.capacity={capacity}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603 - our own program
    try:
        _wait_for_socket(socket, process, log)
        yield socket
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # `returncode` stays None, which is reported below
            process.wait(STOP_TIMEOUT_S)
        if process.returncode != 0:
            raise ProcessFailed(f"kvpoold answered SIGTERM with exit code {process.returncode}\n{log.read_text()}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class Worker:
    """A fresh engine process. Use as a context; leaving it ends the process."""

    def __init__(self, name: str, directory: Path, socket: Path, plan: Path) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        command = [sys.executable, "-m", "demo.worker", str(socket), str(plan)]
        with self._log.open("wb") as errors:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)  # noqa: S603
        self._overdue = threading.Timer(WORKER_TIMEOUT_S, self._process.kill)
        self._overdue.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._overdue.cancel()
        self._process.kill()
        self._process.communicate()

    def get_ready(self) -> Iterator[dict[str, Any]]:
        """What it says until it can be asked."""
        return self._events("ready")

    def ask(self, conversation: int, turn: int) -> Iterator[dict[str, Any]]:
        """Put a question; what the worker says up to its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading its events reports with its last words
            self._process.stdin.write(f"{conversation} {turn}\n")
            self._process.stdin.flush()
        return self._events("turn")

    def _events(self, last: str) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            yield event
            if event["event"] == last:
                return
        raise ProcessFailed(f"{self.name} ended with exit code {self._process.wait()}\n{self._log.read_text()}")


def _wait_for_socket(socket: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """The socket appears when requests are served."""
    deadline = Deadline(START_TIMEOUT_S)
    while not socket.exists():
        if process.poll() is not None or deadline.has_passed():
            raise ProcessFailed(f"kvpoold does not serve\n{log.read_text()}")
        time.sleep(0.02)
