"""Daemons forked from a process that has imported them: a start is mostly Python's imports, and tests start thousands.

    python -m tests.rigs.runs.forking FD

serves one test process over a socket until that ends. Each daemon has a session, an environment, a log and an exit code of its
own, as one that was executed; `ForkedDaemon` stands for it as `subprocess.Popen` would. Tests of the start itself, of bounds on
time and of what an environment changes execute their daemons.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys

from kvpool import failpoint

REQUEST_BYTES_MAX = 1 << 20
STATUS_BYTES = 4
# Set by pytest itself for each test.
NOT_COMPARED = "PYTEST_CURRENT_TEST"
AT_IMPORT = frozenset(os.environ)


class ForkedDaemon:
    """A running or ended daemon; the methods and attributes of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, arguments: list[str], status: int) -> None:
        """`status`: the reading end of a pipe that gets the wait status."""
        self.pid = pid
        self.args = arguments
        self.returncode: int | None = None
        self._status = status

    def __repr__(self) -> str:
        return f"<ForkedDaemon {self.pid} {self.returncode}>"

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            found = os.read(self._status, STATUS_BYTES)
            os.close(self._status)
            assert len(found) == STATUS_BYTES, "the process that forks daemons has died"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(found, "little"))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended, of which the forking process may not have written yet."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


class DaemonFork:
    """The forking process of this process. Not thread-safe."""

    def __init__(self) -> None:
        self._environment = _compared_environment()
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.runs.forking", str(others.fileno())],
                pass_fds=[others.fileno()],
                start_new_session=True,
            )
        self._socket = own

    def fits(self) -> bool:
        """Whether a daemon would have the environment that the modules were imported in."""
        return self._environment == _compared_environment()

    def start(self, arguments: list[str], log: int, failpoints: str = "") -> ForkedDaemon:
        """A daemon with these arguments and that log, whose failpoints are these."""
        reading, writing = os.pipe()
        try:
            request = json.dumps({"arguments": arguments, "directory": os.getcwd(), "failpoints": failpoints}).encode()
            assert len(request) <= REQUEST_BYTES_MAX
            socket.send_fds(self._socket, [request], [log, writing])
            pid = int.from_bytes(self._socket.recv(STATUS_BYTES), "little")
        finally:
            os.close(writing)
        return ForkedDaemon(pid, arguments, reading)


class Starts:
    """How this process's tests start their daemons. `are_executed`: by executing Python, as an operator does."""

    are_executed = False
    _fork: DaemonFork | None = None

    @classmethod
    def fork(cls) -> DaemonFork | None:
        """The forking process, where daemons may be forked."""
        if cls.are_executed or (cls._fork is None and _has_settings_of_a_test()):
            return None
        cls._fork = cls._fork or DaemonFork()
        return cls._fork if cls._fork.fits() else None


def _has_settings_of_a_test() -> bool:
    """Whether a test has set variables of kvpool: a fork that is begun meanwhile would fit no other test."""
    return any(name.startswith("KVPOOL_") and name not in AT_IMPORT for name in os.environ)


def _compared_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != NOT_COMPARED}


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork a daemon for each request until the tests have ended; the arguments of one, in its own process."""
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([asked.fileno(), ended], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
        _report_ended(statuses)
        if asked.fileno() not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 2)
        if not request:
            return None
        log, status = fds
        pid = os.fork()
        if not pid:
            for fd in (ended, wakes, status, *statuses.values()):
                os.close(fd)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked.close()
            return _become(json.loads(request), log)
        os.close(log)
        statuses[pid] = status
        asked.send(pid.to_bytes(STATUS_BYTES, "little"))


def _report_ended(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(statuses[pid], status.to_bytes(STATUS_BYTES, "little"))
        os.close(statuses.pop(pid))


def _become(request: dict[str, object], log: int) -> list[str]:
    """Make this process a daemon's: its session, its files, its directory; its arguments."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(str(request["directory"]))
    if request["failpoints"]:
        os.environ[failpoint.VARIABLE] = str(request["failpoints"])
        failpoint.reach = failpoint.arm_from_environment()
    arguments = request["arguments"]
    assert isinstance(arguments, list)
    return arguments


def main() -> None:
    """Serve the socket whose descriptor is the argument."""
    from kvpool.cli import (
        kvpoold,
        serving,  # noqa: F401 - what a start takes its time for
    )

    # A collection of a daemon would copy every page of what it shares with its parent.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["kvpoold", *arguments]
        kvpoold.main()


if __name__ == "__main__":
    main()
