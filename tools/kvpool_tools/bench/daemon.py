"""Daemon that a benchmark measures: its own, started and stopped by it, or a named one.

It is observed from outside: by requests of an operator, and by the kernel's figures for its process. Main thread of a command.
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.clock import Deadline
from kvpool.errors import DaemonUnreachable, KVPoolError
from kvpool.keys import namespace_name
from kvpool.protocol.blocking import BlockingConnection
from kvpool.units import format_size
from kvpool_tools.bench.measure import cpu_seconds
from kvpool_tools.sim.children import start_bound, stop

# Of every benchmark's model: its bytes mean nothing, and are dropped afterwards.
REVISION = "1"
REQUEST_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
# Pre-faulting pages and making them huge: 1.5 s of CPU for each GiB on two threads, measured; ten times that on a busy machine.
SETTLE_TIMEOUT_S_PER_GIB = 15.0
READY_POLL_S = 0.001
SETTLE_POLL_S = 0.05
OPEN_TIMEOUT_S = 60.0
# Each check costs the daemon a handshake while it opens its tier.
OPEN_POLL_S = 0.01
MEMORY_SHARE_MAX = 0.85


@dataclass(frozen=True, slots=True)
class MeasuredDaemon:
    """A serving daemon. `is_own`: it was started for the benchmark, and has no other users."""

    socket: str
    pid: int
    capacity_bytes: int
    is_own: bool

    def cpu_seconds(self) -> float:
        """CPU time of the daemon so far, all threads. Raises DaemonUnreachable when it is unknown."""
        try:
            return cpu_seconds(self.pid)
        except ProcessLookupError as error:
            raise DaemonUnreachable(
                f"process {self.pid} of the daemon at {self.socket} cannot be seen: "
                "it has ended, or runs where this machine's process numbers do not hold"
            ) from error

    def stats(self) -> dict[str, Any]:
        """All counters, sections joined."""
        with self._connect() as connection:
            return {name: value for section in connection.stats().values() for name, value in section.items()}

    def info(self) -> dict[str, Any]:
        """The daemon's identity and resources."""
        with self._connect() as connection:
            return connection.info()

    def forget(self, model: str, tier: str = "") -> None:
        """Drop what a benchmark stored under its model, so that a shared daemon gives the memory to others."""
        with self._connect() as connection:
            connection.flush(namespace_name(model, REVISION), None, tier)

    def demote_all(self, timeout_s: float) -> dict[str, Any]:
        """Write chunks that only DRAM has to the SSD tier, and sync."""
        with self._connect() as connection:
            return connection.demote_all(timeout_s)

    def _connect(self) -> BlockingConnection:
        return BlockingConnection.admin(self.socket, REQUEST_TIMEOUT_S)


def found_daemon(socket: str) -> MeasuredDaemon:
    """The daemon that serves a socket already. Raises DaemonUnreachable."""
    with BlockingConnection.admin(socket, REQUEST_TIMEOUT_S) as connection:
        info = connection.info()
    return MeasuredDaemon(socket, info["pid"], info["dram_capacity_bytes"], is_own=False)


@contextmanager
def own_daemon(capacity: int, *options: str) -> Iterator[MeasuredDaemon]:
    """A daemon for this benchmark alone, whose arena has its pages, huge ones included: that work is not measured."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        socket = f"{directory}/kvpool.sock"
        process = start_daemon(socket, capacity, *options)
        try:
            wait_until_ready(socket, process)
            wait_until_settled(socket, process, capacity)
            yield MeasuredDaemon(socket, process.pid, capacity, is_own=True)
        finally:
            stop(process)


def start_daemon(socket: str, capacity: int, *options: str) -> "subprocess.Popen[bytes]":
    """Start a daemon; it may not serve yet. Raises KVPoolError when the machine has too little memory."""
    available = memory_available_bytes()
    if capacity > available * MEMORY_SHARE_MAX:
        raise KVPoolError(
            f"a daemon of {format_size(capacity)} does not fit: {format_size(available)} are available, "
            f"expected a capacity of at most {MEMORY_SHARE_MAX:.0%} of them"
        )
    # One client is the whole load: it may hold all of a small tier.
    named = {
        "server.socket": socket,
        "dram.capacity": f"{capacity}B",
        "dram.connection_quota": "1.0",
        "log.level": "warning",
        "server.keep_memory": "off",  # the next measurement needs the memory
    }
    sets = [f"--set={name}={value}" for name, value in named.items()]
    return start_bound("kvpool.cli.kvpoold", [*sets, *(f"--set={option}" for option in options)])


def wait_until_ready(socket: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the daemon answers. Raises KVPoolError when it ends or time runs out."""
    deadline = Deadline(START_TIMEOUT_S)
    while not _answers(socket):
        if process.poll() is not None:
            raise KVPoolError(f"kvpoold ended with exit code {process.returncode} before it served {socket}")
        if deadline.has_passed():
            raise KVPoolError(f"kvpoold did not serve {socket} within {START_TIMEOUT_S:.0f} s")
        time.sleep(READY_POLL_S)


def wait_until_settled(socket: str, process: "subprocess.Popen[bytes]", capacity: int) -> dict[str, Any]:
    """Wait until the arena has all its pages. Returns `info` of that moment. Raises KVPoolError when the daemon ends or time
    runs out."""
    timeout_s = START_TIMEOUT_S + SETTLE_TIMEOUT_S_PER_GIB * capacity / (1 << 30)
    deadline = Deadline(timeout_s)
    with BlockingConnection.admin(socket, REQUEST_TIMEOUT_S) as connection:
        while (info := connection.info())["dram_is_settling"]:
            if deadline.has_passed() or process.poll() is not None:
                raise KVPoolError(f"the daemon at {socket} did not settle within {timeout_s:.0f} s")
            time.sleep(SETTLE_POLL_S)
    return info


def wait_until_open(daemon: MeasuredDaemon) -> None:
    """Wait until the SSD tier serves. Raises KVPoolError when it cannot."""
    deadline = Deadline(OPEN_TIMEOUT_S)
    while (state := daemon.stats()["ssd.state"]) != "ok":
        if state != "starting" or deadline.has_passed():
            raise KVPoolError(f"the ssd tier is {state}: {daemon.info()['ssd_reason']}")
        time.sleep(OPEN_POLL_S)


def memory_available_bytes() -> int:
    """Memory available without swapping, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KVPoolError("/proc/meminfo names no MemAvailable")


def _answers(socket: str) -> bool:
    try:
        BlockingConnection.admin(socket, REQUEST_TIMEOUT_S).close()
    except DaemonUnreachable:
        return False
    return True
