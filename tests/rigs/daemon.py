"""A real kvpoold for a test: its own directory and socket, started, stopped, killed and restarted.

Waits by looking, never by sleeping a fixed time: every wait has a deadline and fails with the daemon's own words. A daemon that
has logged an error of its code fails its test at the end; a test that provokes one sets `may_log_errors`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.protocol import verify_walk
from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.runs.forking import ForkedDaemon, Starts

START_TIMEOUT_S = 60.0
# What an answer may take where other work has the processors: a test of a daemon that gives none says less.
ANSWER_TIMEOUT_S = 30.0
SMALL = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32)
# What Python and asyncio log where an exception was not foreseen.
UNFORESEEN = ("Traceback (most recent call last)", "Exception in callback", "never retrieved", "Task was destroyed")
# Options of a daemon by its write mode. Staging is so small that most saves go through it in several pieces.
WRITE_MODES = {"in-place": {}, "copy": {"server.write_mode": "copy", "server.staging": "64KiB"}}
LOG_SHOWN = 3000
LOOK_S, LOOK_MAX_S = 0.004, 0.04
PROGRAM = (sys.executable, "-m", "kvpool.cli.kvpoold")
in_both_write_modes = pytest.mark.parametrize("write_mode", WRITE_MODES, indirect=True)


class Daemon:
    """One kvpoold process after another at one socket."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.environment: dict[str, str] = {}
        self.may_log_errors = False
        self._forgiven = 0
        self.socket = str(directory / "kvpool.sock")
        self._log = directory / "kvpoold.log"
        self._options = {
            "dram.capacity": "16MiB",
            "dram.connection_quota": "1.0",  # most tests have one client, and some fill DRAM through it
            "server.user_quota": "1.0",
            "log.level": "info",
            "dram.huge_pages": "off",
            "server.keep_memory": "off",  # a keeper would have the memory of each daemon for minutes
            **({"ssd.create": "true"} if options.get("ssd.path") else {}),
            **options,
        }
        self.process: subprocess.Popen[bytes] | ForkedDaemon | None = None

    def __enter__(self) -> "Daemon":
        """Started, if it was not before."""
        if not self._runs():
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self._runs():
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        if kind is None and not self.may_log_errors:
            self.assert_no_errors()
        if kind is not None and self._log.exists():
            print(f"the log of {self.socket} ends:\n{self.log()[-LOG_SHOWN:]}")  # shown with the test that has failed

    def assert_no_errors(self) -> None:
        """Fails with the log where it has an error of the daemon's code."""
        log = self.log()[self._forgiven :] if self._log.exists() else ""
        found = [log.find(words) for words in UNFORESEEN if words in log]
        assert not found, (
            f"the daemon has logged an error of its own:\n{log[max(0, min(found) - 2000) : min(found) + 4000]}"
        )

    def forgive_logged_errors(self) -> None:
        """Errors logged until now fail no test: the test provoked them."""
        self._forgiven = len(self.log())

    @property
    def node(self) -> str:
        """Its name among other nodes, empty where it has none."""
        return self._options.get("peer.name", "")

    def command(self) -> list[str]:
        """The command line."""
        sets = [f"--set=server.socket={self.socket}", *(f"--set={key}={value}" for key, value in self._options.items())]
        return [*PROGRAM, *sets]

    def _runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self, *arguments: str) -> None:
        """Start with further arguments for this life, and wait for nothing. REQUIRES: the last one has ended."""
        assert not self._runs(), "it runs, and would be left behind"
        is_plain = set(self.environment) <= {failpoint.VARIABLE} and type(self).command is Daemon.command
        fork = Starts.fork() if is_plain else None
        with self._log.open("ab") as log:
            if fork is not None:
                failpoints = self.environment.get(failpoint.VARIABLE, "")
                self.process = fork.start([*self.command()[len(PROGRAM) :], *arguments], log.fileno(), failpoints)
                return
            self.process = subprocess.Popen(
                [*self.command(), *arguments],
                stderr=log,
                stdout=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def start(self, *arguments: str) -> None:
        """Start with further arguments for this life, and wait until the daemon answers."""
        self.launch(*arguments)
        assert self.process is not None
        wait_until(self._answers_or_died, f"daemon answers at {self.socket}", START_TIMEOUT_S)
        assert self.process.poll() is None, self.log()

    def wait_open(self) -> None:
        """Until its SSD tier is open."""
        wait_until(lambda: self.stats()["ssd.state"] == "ok", "the tier is open")

    def stop(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        """Any signal."""
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        """The daemon's log so far."""
        return self._log.read_text()

    def connect(self, layout: kv.Layout = SMALL, **arguments: Any) -> kv.Pool:
        """A Pool on this daemon."""
        defaults = {"model": "test-model", "layout": layout, "timeout_s": ANSWER_TIMEOUT_S}
        return kv.connect(self.socket, **{**defaults, **arguments})

    def admin(self) -> BlockingConnection:
        """An operator's connection."""
        return BlockingConnection.admin(self.socket, ANSWER_TIMEOUT_S)

    def stats(self) -> dict[str, Any]:
        """All statistics, sections joined."""
        with self.admin() as connection:
            return {name: value for section in connection.stats().values() for name, value in section.items()}

    def info(self) -> dict[str, Any]:
        """What is in use."""
        with self.admin() as connection:
            return connection.info()

    def problems(self, *, deep: bool = True) -> list[str]:
        """The problems that `check` finds, with `deep` every bad chunk too."""
        with self.admin() as connection:
            report = connection.check()
            problems: list[str] = report["problems"]
            if deep:
                found = verify_walk.read_all(connection.verify_bytes, verify_walk.every(report["tiers"]), sys.maxsize)
                problems = [*problems, *verify_walk.problems_of(found)]
        return problems

    def _answers_or_died(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None or self.answers()

    def answers(self) -> bool:
        """True if an operator can connect."""
        try:
            self.admin().close()
        except (KVPoolError, OSError):
            return False
        return True


# What starts daemons that end with the test; options are `section__key="value"`.
Start = Callable[..., Daemon]


def freeze(process: "subprocess.Popen[Any]") -> None:
    """SIGSTOP, and wait until none of its threads runs any more: until one of them has taken the signal, the others go on."""
    process.send_signal(signal.SIGSTOP)

    def is_frozen() -> bool:
        stats = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(is_frozen, f"process {process.pid} stands still")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
    """Until the condition holds; fails with `what` after the time. It looks less often as time passes: a look costs CPU."""
    deadline, pause_s = time.monotonic() + timeout_s, LOOK_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        select.select([], [], [], pause_s)
        pause_s = min(1.25 * pause_s, LOOK_MAX_S)


def wait_connected(pool: kv.Pool) -> None:
    """Until the Pool is served."""
    wait_until(lambda: pool.connected, "pool is connected")


def importing() -> dict[str, str]:
    """The environment of a process of its own that imports the tests."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "client"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def spawn(code: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A Python process of its own, with the tests importable, that talks over stdin and stdout.

    It has to end by itself; a test that fails ends it.
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=importing(),
    ) as process:
        try:
            yield process
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(START_TIMEOUT_S)
        finally:
            process.kill()
