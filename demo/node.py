"""The processes of the demonstration: a daemon on a socket of its own, and workers that are asked and read line by line.

Every wait has a deadline and every process an end: leaving the context stops what still runs. One thread, and a timer
for each worker.
"""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.clock import Deadline
from kvpool.errors import DaemonUnreachable
from kvpool.protocol import verify_walk
from kvpool.protocol.blocking import BlockingConnection

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
WORKER_TIMEOUT_S = 300.0
ASK_TIMEOUT_S = 5.0
DEMOTE_ALL_TIMEOUT_S = 60.0


class ProcessFailed(Exception):
    """A process of the demonstration did not do its part; carries its last words."""


@dataclass(frozen=True, slots=True)
class Member:
    """A daemon of a fleet on this machine: its name, its own control port and those of all members."""

    name: str
    port: int
    ports: tuple[int, ...]

    def to_options(self) -> list[str]:
        """Options of the daemon. Loopback addresses need no keys."""
        members = ", ".join(f"127.0.0.1:{port}" for port in self.ports)
        return [
            f"--set=peer.name={self.name}",
            f"--set=peer.listen=tcp://127.0.0.1:{self.port}",
            "--set=peer.stream=tcp://127.0.0.1:0",
            "--set=peer.shm=false",  # both stand for nodes on hosts of their own
            f"--set=peer.members={members}",
        ]


def make_fleet(*names: str) -> list[Member]:
    """Members on ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = tuple(int(one.getsockname()[1]) for one in sockets)
    return [Member(name, port, ports) for name, port in zip(names, ports, strict=True)]


class Daemon:
    """One kvpoold after another at one socket and on one SSD directory, otherwise with the built-in defaults.

    A context: within it a daemon runs; leaving it ends the last one, which has to answer SIGTERM with exit code 0.
    `member`: its place in a fleet; None: it has no peers.
    """

    def __init__(self, directory: Path, *, dram_capacity: str, ssd_capacity: str, member: Member | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.socket = directory / "kvpool.sock"
        self._log = directory / "kvpoold.log"
        self._command = [
            *(sys.executable, "-m", "kvpool.cli.kvpoold"),
            f"--set=server.socket={self.socket}",
            f"--set=dram.capacity={dram_capacity}",
            f"--set=ssd.path={directory / 'ssd'}",
            "--set=ssd.create=true",
            "--set=server.keep_memory=off",  # what an act shows of the SSD tier is not to come from kept memory
            f"--set=ssd.capacity={ssd_capacity}",
            *(member.to_options() if member is not None else ()),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Daemon":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._stop()
        finally:
            self.kill()

    def start(self) -> None:
        """Start a daemon; returns when it serves and its SSD tier is open. What it finds on disk is restored by then."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)  # noqa: S603 - our own program
        self._wait_for("does not serve", lambda: self.socket.exists() and self._answers())
        self._wait_for("does not open its SSD tier", lambda: self.stats()["ssd.state"] == "ok")

    def kill(self) -> None:
        """Kill -9. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def demote_all(self) -> int:
        """Have the SSD tier keep what DRAM alone has; how many chunks it has then. Raises ProcessFailed if some are left."""
        with BlockingConnection.admin(str(self.socket), ASK_TIMEOUT_S) as connection:
            left = connection.demote_all(DEMOTE_ALL_TIMEOUT_S)["left"]
        if left:
            raise ProcessFailed(f"{left} chunks were not written to the SSD tier\n{self._log.read_text()}")
        return int(self.stats()["ssd.chunks"])

    def wait_known(self, chunks: int) -> None:
        """Wait until it knows of so many chunks of other nodes."""
        self._wait_for(f"does not know {chunks} chunks of its peer", lambda: self._known_chunks() >= chunks)

    def verify(self) -> int:
        """Have every chunk compared with its checksums; how many. Raises ProcessFailed if one differs."""
        with BlockingConnection.admin(str(self.socket), ASK_TIMEOUT_S) as connection:
            records = verify_walk.every(connection.check()["tiers"])
            found = verify_walk.read_all(connection.verify_bytes, records, sys.maxsize)
        if problems := verify_walk.problems_of(found):
            raise ProcessFailed("\n".join(problems))
        return int(found["verified"])

    def stats(self) -> dict[str, int | float | str]:
        """Its statistics, sections joined."""
        with BlockingConnection.admin(str(self.socket), ASK_TIMEOUT_S) as connection:
            return {name: value for section in connection.stats().values() for name, value in section.items()}

    def _known_chunks(self) -> int:
        return int(self.stats().get("peer.known_chunks", 0))

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # `returncode` stays None, which is reported below
            self._process.wait(STOP_TIMEOUT_S)
        if self._process.returncode != 0:
            code = self._process.returncode
            raise ProcessFailed(f"kvpoold answered SIGTERM with exit code {code}\n{self._log.read_text()}")

    def _answers(self) -> bool:
        """Whether somebody serves: a daemon that was killed leaves its socket behind."""
        with contextlib.suppress(DaemonUnreachable):  # looked at again until the deadline
            self.stats()
            return True
        return False

    def _wait_for(self, what_not: str, condition: Callable[[], bool]) -> None:
        assert self._process is not None
        deadline = Deadline(START_TIMEOUT_S)
        while not condition():
            if self._process.poll() is not None or deadline.has_passed():
                raise ProcessFailed(f"kvpoold {what_not}\n{self._log.read_text()}")
            time.sleep(0.02)


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
