"""One life of the daemon after another at one socket: those that end early, those of somebody else, and what they leave."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.ownership import fault_of_root
from tests.rigs.daemon import Daemon, spawn, wait_until
from tests.rigs.notify_socket import NotifySocket

OTHER_UID = 61_001

# Claims a socket's place as another user.
CLAIM = """
import os, sys
from kvpool.errors import ConfigError
from kvpool.server.connections.local_socket import LocalSocket
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    LocalSocket(sys.argv[1], mode=0o600, handshake_timeout_s=1.0, on_refused=print)
except ConfigError as error:
    print(error.faults)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for other users")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifySocket]:
    """The service manager of daemons started in the test."""
    with NotifySocket(str(tmp_path / "notify")) as socket:
        monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
        yield socket


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that another user may enter, where not everybody may write above it."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir="/run"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _leave(daemon: Daemon, early_ends: int) -> None:
    Path(f"{daemon.socket}.lock").write_text(str(early_ends))


def _is_waiting(manager: NotifySocket) -> bool:
    """Whether it has sent both messages of a wait of 300 s, of which the manager gives it 90 s more."""
    manager.take()
    sent = [line for lines in manager.received for line in lines]
    has_status = any(line.startswith("STATUS=waits 300 s") for line in sent)
    return has_status and "EXTEND_TIMEOUT_USEC=390000000" in sent


def test_a_daemon_whose_lives_end_early_waits_until_it_is_stopped_by_hand(
    manager: NotifySocket, tmp_path: Path
) -> None:
    daemon = Daemon(tmp_path)
    _leave(daemon, 20)
    daemon.launch()
    wait_until(lambda: _is_waiting(manager), "the daemon reports that it waits")
    assert (daemon.answers(), manager.count("READY=1")) == (False, 0)
    assert daemon.stop() == 0
    with daemon:
        wait_until(lambda: manager.count("READY=1") == 1, "it reports that it serves")
        assert daemon.info()["early_ends"] == 0, "the restart by hand has not waited"


def test_kills_are_counted_and_shown_and_a_stop_is_not_one(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        for early_ends in range(1, 4):
            daemon.kill()
            daemon.start()
            assert daemon.info()["early_ends"] == early_ends
        assert daemon.stop() == 0
        assert not Path(f"{daemon.socket}.lock").exists()
        daemon.start()
        assert daemon.info()["early_ends"] == 0


def test_a_stop_during_the_start_is_no_early_end(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, **{"dram.capacity": "512MiB", "dram.segment": "512MiB"})
    lock = Path(f"{daemon.socket}.lock")
    for _ in range(5):
        daemon.launch()
        wait_until(lock.exists, "it has begun")
        assert daemon.stop() in (0, -signal.SIGTERM)
        assert list(tmp_path.glob("kvpool.sock*")) == []


def test_a_daemon_that_waits_does_not_serve_for_a_check(manager: NotifySocket, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    _leave(daemon, 20)
    daemon.launch()
    wait_until(lambda: _is_waiting(manager), "the daemon reports that it waits")
    check = [*daemon.command(), "--check", "--set", "dram.capacity=4TiB"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "dram.capacity 4.0 TiB takes" in done.stderr) == (2, True)
    assert daemon.stop() == 0


def test_who_cannot_serve_has_ended_early_and_who_is_refused_has_not(tmp_path: Path) -> None:
    for option, code in (("dram.capacity=4TiB", 1), ("dram.numa=1000", 2)):
        (tmp_path / str(code)).mkdir()
        daemon = Daemon(tmp_path / str(code))
        lock = Path(f"{daemon.socket}.lock")
        done = subprocess.run([*daemon.command(), "--set", option], capture_output=True, timeout=120, check=False)
        assert done.returncode == code
        assert lock.exists() is (code == 1)


def test_two_daemons_that_begin_at_once_share_no_socket(tmp_path: Path) -> None:
    """One is killed, and the others begin while its file is removed by a clean end."""
    with Daemon(tmp_path) as daemon:
        for _ in range(3):
            others = [
                subprocess.Popen(daemon.command(), stderr=subprocess.DEVNULL, start_new_session=True) for _ in range(3)
            ]
            daemon.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]  # it runs
            wait_until(lambda others=others: sum(one.poll() is None for one in others) <= 1, "one is left at most")  # type: ignore[misc]
            for one in others:
                one.kill()
                one.wait()
            assert daemon.process is not None
            daemon.process.wait()
            daemon.start()
        assert daemon.problems() == []


@needs_root
@pytest.mark.parametrize("place", ["kvpool.sock", "made/kvpool.sock"])
def test_root_does_not_serve_in_another_users_directory(tmp_path: Path, folder: Path, place: str) -> None:
    os.chown(folder, OTHER_UID, OTHER_UID)
    command = [sys.executable, "-m", "kvpool.cli.kvpoold", "--set", f"server.socket={folder}/{place}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"{folder} belongs to user {OTHER_UID}" in done.stderr
    assert f"runuser -u {OTHER_UID} -- kvpoold" in done.stderr
    assert list(folder.iterdir()) == []
    os.chown(folder, 0, 0)
    assert fault_of_root(f"{folder}/{place}") == ""


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_socket_that_another_user_has_left_is_named_where_nobody_else_may_remove_it(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    path = str(folder / "kvpool.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    os.chmod(path, 0o660)
    with spawn(CLAIM, path, str(OTHER_UID)) as claiming:
        assert claiming.stdout is not None
        text = claiming.stdout.read()
    if mode & stat.S_ISVTX:
        assert f"{path} was left there by user root: remove it (as root: rm {path})" in text
    else:
        assert text == ""


@needs_root
def test_a_lock_that_another_user_has_left_is_named_with_its_owner_and_the_remedy(folder: Path) -> None:
    os.chown(folder, OTHER_UID, OTHER_UID)
    lock = folder / "kvpool.sock.lock"
    lock.touch(mode=0o600)
    with spawn(CLAIM, str(folder / "kvpool.sock"), str(OTHER_UID)) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
    assert f"{lock} belongs to user root" in answer
    assert f"rm {lock}" in answer
