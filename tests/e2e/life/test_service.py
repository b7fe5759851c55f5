"""kvpoold as a service: what it reports to its service manager, and when it stops reporting."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.notify_socket import NotifySocket

# Probes every 100 ms.
WATCHDOG_USEC = "300000"
SILENCE_S = 1.0

# The daemon with faults on demand. SIGUSR1: the control thread stops until SIGUSR2, or a transfer job ends unreported.
FAULTY_DAEMON = """
import gc, os, signal, sys
from kvpool.cli.kvpoold import run
from kvpool.transfer.workers import Workers

def hang(*_):
    signal.sigwait({signal.SIGUSR2})

def lose_outcome(*_):
    gc.unfreeze()  # else those that were there when serving began are not among them
    for entry in gc.get_objects():
        if isinstance(entry, Workers):
            entry.submit(os.getpid, sys.exit)

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
signal.signal(signal.SIGUSR1, {"hang": hang, "lose_outcome": lose_outcome}[sys.argv[1]])
sys.exit(run(sys.argv[2:]))
"""

# The daemon as the unit confines it, as far as a process can do that to itself: no memory both writable and executable.
CONFINED_DAEMON = """
import ctypes, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
    sys.exit(77)
from kvpool.cli.kvpoold import run
sys.exit(run(sys.argv[1:]))
"""


class Service(Daemon):
    """A daemon with a prefix to its command line."""

    prefix: list[str]

    def __exit__(self, *_: object) -> None:
        """Ends the whole session: the process may be a tracer, which would leave the daemon behind."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        super().__exit__()

    def command(self) -> list[str]:
        plain = super().command()
        return plain if not self.prefix else [*self.prefix, *plain[3:]]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifySocket]:
    """The service manager of daemons started in the test; it requests watchdog messages."""
    with NotifySocket(str(tmp_path / "notify")) as socket:
        monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
        monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield socket


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a daemon whose command line begins differently."""
    started: list[Service] = []

    def start(*prefix: str, is_awaited: bool = True) -> Service:
        directory = tmp_path / f"service-{len(started)}"
        directory.mkdir()
        service = Service(directory)
        service.prefix = list(prefix)
        started.append(service)
        if is_awaited:
            service.start()
        return service

    yield start
    for service in started:
        service.__exit__()


def test_ready_comes_when_the_socket_serves(manager: NotifySocket, start_service: Callable[..., Service]) -> None:
    service = start_service(is_awaited=False)
    with open(os.devnull, "wb") as nowhere:
        service.process = subprocess.Popen(service.command(), stdout=nowhere, stderr=nowhere, start_new_session=True)
    wait_until(lambda: bool(manager.take()), "the first message")
    BlockingConnection.admin(service.socket, 60.0).close()
    assert manager.received[0][0] == "READY=1"
    assert manager.received[0][1].startswith(f"STATUS=serving at {service.socket}: dram 16.0 MiB")


def test_sigterm_notifies_stopping_and_exits_with_0_and_who_cannot_serve_never_reports_ready(
    manager: NotifySocket, daemon: Daemon
) -> None:
    manager.wait_for("WATCHDOG=1")
    ready = manager.count("READY=1")
    second = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 1
    assert "already serves" in second.stderr
    assert manager.count("READY=1") == ready == 1
    assert daemon.stop() == 0
    manager.take()
    assert manager.count("STOPPING=1") == 1
    assert [
        "STOPPING=1",
        "STATUS=draining: saves under way may still be committed, DRAM is being written to disk",
    ] in manager.received
    assert "unhealthy" not in daemon.log()


def test_the_watchdog_is_notified_of_each_probe_and_the_pool_retains_one_chunk_until_the_daemon_stands_still(
    manager: NotifySocket, daemon: Daemon
) -> None:
    manager.wait_for("WATCHDOG=1", times=4)
    # Between two steps of a probe there may be two chunks. Its lease does not count.
    expected = {"dram.chunks": 1, "leases": 0, "namespaces": 1, "evicted_chunks": 0, "dram.dropped_chunks": 0}
    wait_until(lambda: expected.items() <= daemon.stats().items(), "one chunk is kept, those of older probes go")
    stats = daemon.stats()
    assert int(stats["saved_chunks"]) >= 4
    assert int(stats["dram.segments"]) - int(stats["dram.free_segments"]) == 1
    with daemon.admin() as admin:
        info = admin.info()
    assert (info["health"], info["problems"]) == ("ready", [])
    assert info["probe_age_s"] >= 0
    assert 0 < info["probe_latency_s"] < time.monotonic()
    assert "self-probe every 0.1 s" in daemon.log()
    assert daemon.problems() == []
    daemon.signal(signal.SIGSTOP)
    _assert_silence(manager)
    daemon.signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1", times=2)


def test_without_a_manager_nothing_is_probed(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        info = admin.info()
    assert (info["health"], info["problems"], info["probe_age_s"]) == ("ready", [], None)
    stats = daemon.stats()
    assert (stats["connections"], stats["saved_chunks"]) == (1, 0)
    assert "self-probe off" in daemon.log()


def _has_status(manager: NotifySocket, beginning: str) -> bool:
    manager.take()
    return any(line.startswith(beginning) for lines in manager.received for line in lines)


def _assert_silence(manager: NotifySocket) -> None:
    """No WATCHDOG=1 for several intervals, one under way aside."""
    with pytest.raises(AssertionError, match="not within"):
        manager.wait_for("WATCHDOG=1", times=2, timeout_s=SILENCE_S)


@pytest.mark.slow
def test_a_hung_control_thread_stops_the_watchdog_messages(
    manager: NotifySocket, start_service: Callable[..., Service]
) -> None:
    service = start_service(sys.executable, "-c", FAULTY_DAEMON, "hang")
    manager.wait_for("WATCHDOG=1")
    service.signal(signal.SIGUSR1)
    _assert_silence(manager)
    wait_until(lambda: _has_status(manager, "STATUS=unhealthy: self-probe: "), "the failed probe is notified")
    service.signal(signal.SIGUSR2)
    manager.wait_for("WATCHDOG=1", times=3)
    assert (service.log().count("unhealthy"), service.log().count("healthy again")) == (1, 1)
    assert service.stop() == 0


def test_a_lost_thread_stops_the_watchdog_messages_although_engines_are_served(
    manager: NotifySocket, start_service: Callable[..., Service]
) -> None:
    service = start_service(sys.executable, "-c", FAULTY_DAEMON, "lose_outcome")
    service.may_log_errors = True  # its cause
    manager.wait_for("WATCHDOG=1")
    service.signal(signal.SIGUSR1)
    _assert_silence(manager)
    with service.admin() as admin:
        info = admin.info()
    assert (info["health"], info["problems"]) == ("unhealthy", ["transfer: the outcome of a job was lost"])
    probed = service.stats()["saved_chunks"]
    wait_until(lambda: service.stats()["saved_chunks"] > probed, "it still probes")


def test_the_daemon_works_without_writable_and_executable_memory(
    manager: NotifySocket, start_service: Callable[..., Service]
) -> None:
    service = start_service(sys.executable, "-c", CONFINED_DAEMON, is_awaited=False)
    try:
        service.start()
    except AssertionError:
        assert service.process is not None
        if service.process.returncode == 77:
            pytest.skip("this kernel has no PR_SET_MDWE")
        raise
    manager.wait_for("WATCHDOG=1", times=2)
    assert service.stop() == 0
