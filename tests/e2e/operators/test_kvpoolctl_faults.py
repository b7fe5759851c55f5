"""`kvpoolctl` with nonsensical values, and with a closed standard output: usage errors and one line."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool.errors import DaemonUnresponsive
from kvpool.protocol.blocking import BlockingConnection
from kvpool_tools.cli import kvpoolctl
from kvpool_tools.cli.kvpoolctl import main
from tests.rigs.daemon import Daemon
from tests.rigs.kvpoolctl import ctl

HUGE = "9" * 400
PRINTING = [
    "info",
    "stats",
    "stats --json",
    "stats --watch --count 2 --interval 10ms",
    "connections",
    "events",
    "check",
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["events", "--since", "9" * 30], rf"{'9' * 30} is not in the range -1<=x<=9223372036854775807"),
        (["events", "--since", str(1 << 63)], "is not in the range"),
        (["stats", "--watch", "--interval", "90000d"], "--interval is 90000d, expected 10ms to 1d"),
        (["stats", "--watch", "--interval", "0s"], "--interval is 0s, expected 10ms to 1d"),
        (["stats", "--watch", "--interval", f"{HUGE}s"], "is too long a duration, expected at most 100000d"),
        (["flush", "--yes", "--older-than", f"{HUGE}d"], "is too long a duration, expected at most 100000d"),
        (["mrc", "--add", f"{HUGE}TiB"], "is too large a size, expected less than 8388608TiB"),
        (["mrc", "--add", f"{HUGE}.5TiB"], "is too large a size"),
        (["disconnect", "9" * 30], "is not in the range 1<=x<="),
        (["retain", "0" * 64, "--duration", "50d"], "--duration is 50d, expected more than 0 and at most 4294967s"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_nonsensical_values_are_wrong_usage(shared_daemon: Daemon, arguments: list[str], message: str) -> None:
    refused = ctl(shared_daemon, *arguments)
    assert refused.exit_code == 2, refused.output
    assert message in refused.output


@pytest.mark.parametrize("given", ["unix:///run/kvpool/kvpool.sock", "file:///x", "", "a" * 108])
def test_a_socket_that_is_no_path_is_wrong_usage(given: str) -> None:
    refused = ctl(None, "--socket", given, "info")
    assert refused.exit_code == 2, refused.output
    assert "expected a path" in refused.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_socket_without_the_right_to_it_is_reported_with_the_right_remedy() -> None:
    with tempfile.TemporaryDirectory(prefix="kvpool-test-") as directory:
        os.chmod(directory, 0o755)
        path = f"{directory}/kvpool.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            os.chmod(path, 0o660)
            os.chown(path, 0, 4242)
            listener.listen()
            os.seteuid(65534)
            try:
                refused = ctl(None, "--socket", path, "info")
            finally:
                os.seteuid(0)
    assert refused.exit_code == 3
    assert f"no right to connect to {path}: {path} belongs to user root" in refused.output
    assert "--socket" not in refused.output


@pytest.mark.parametrize(
    ("sent", "exit_code", "reason"),
    [(b"\xff" * 64, 1, "frame announces 4294967295 bytes"), (b"", 3, "it closed the connection during the handshake")],
)
def test_whoever_else_serves_a_socket_is_named_by_its_path(
    tmp_path: Path, sent: bytes, exit_code: int, reason: str
) -> None:
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as server:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(sent)

        server.submit(answer)
        refused = ctl(None, "--socket", path, "info")
    assert refused.exit_code == exit_code
    assert f"answers at {path}: {reason}" in refused.output


def test_a_socket_that_is_not_there_is_reported_with_the_option(tmp_path: Path) -> None:
    refused = ctl(None, "--socket", tmp_path / "none.sock", "info")
    assert refused.exit_code == 3
    assert "is kvpoold running? name another socket with --socket PATH or KVPOOL_SOCKET" in refused.output


def test_a_socket_that_is_there_is_named_where_another_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.sock"
    other.touch()
    monkeypatch.setattr(kvpoolctl, "SERVICE_SOCKET", str(other))
    refused = ctl(None, "--socket", tmp_path / "none.sock", "info")
    assert f"name another socket with --socket PATH or KVPOOL_SOCKET, such as {other}" in refused.output


def test_the_environment_names_the_socket_and_the_option_another(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_SOCKET", shared_daemon.socket)
    assert ctl(None, "info").exit_code == 0
    monkeypatch.setenv("KVPOOL_SOCKET", "/nowhere/kvpool.sock")
    assert "no daemon answers at /nowhere/kvpool.sock" in ctl(None, "info").output
    assert ctl(shared_daemon, "info").exit_code == 0
    monkeypatch.setenv("KVPOOL_SOCKET", "unix:///nowhere/kvpool.sock")
    wrong = ctl(None, "info")
    assert wrong.exit_code == 2
    assert "KVPOOL_SOCKET is 'unix:///nowhere/kvpool.sock', expected a path without a scheme" in wrong.output


@pytest.mark.parametrize(
    ("given", "message"),
    [("soon", "'soon' is no duration"), ("0s", "0s, expected 10ms to 1h"), ("2h", "2h, expected 10ms to 1h")],
)
def test_a_timeout_out_of_its_range_is_wrong_usage(given: str, message: str) -> None:
    refused = ctl(None, "--timeout", given, "info")
    assert refused.exit_code == 2
    assert message in refused.output


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_closed_standard_output_is_one_line_and_a_failure(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: str
) -> None:
    """Run in this process; `tests/unit/cli/test_standard_streams.py` executes the command."""
    monkeypatch.setattr(sys, "argv", ["kvpoolctl", "--socket", shared_daemon.socket, *arguments.split()])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.close()
    assert ended.value.code == 1
    assert capfd.readouterr().err == "kvpoolctl: standard output cannot be written: No space left on device\n"


def test_a_stopped_daemon_is_named_with_a_remedy(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.signal(signal.SIGSTOP)
    assert "has not answered within 2 s" in ctl(daemon, "info").output
    silent = ctl(daemon, "--timeout", "200ms", "info")
    assert silent.exit_code == 3
    pid = daemon.process.pid
    assert f"a daemon listens at {daemon.socket} (pid {pid}) but has not answered within 0.2 s" in silent.output
    assert f"kill -CONT {pid}" in silent.output
    assert "is kvpoold running?" not in silent.output
    assert "Errno" not in silent.output
    daemon.signal(signal.SIGCONT)
    assert ctl(daemon, "info").exit_code == 0


def test_a_daemon_that_accepts_no_connection_is_named_too(tmp_path: Path) -> None:
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(DaemonUnresponsive, match=r"listens at .*full.sock but has not answered .*kill -CONT PID"):
            BlockingConnection.admin(path, 0.1)
