"""A stranger who makes a socket's directory, or the socket, before the daemon does: neither daemon nor client trusts it."""

import os
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvpool_client as kv
from kvpool import ownership
from kvpool.errors import DaemonUnreachable
from kvpool.protocol.blocking import BlockingConnection
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import SMALL, Daemon

STRANGER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory somebody else's")


@pytest.fixture
def squatted() -> Iterator[Path]:
    """A directory that a stranger made where everybody may write, and may pass to."""
    with tempfile.TemporaryDirectory() as everybodys:
        Path(everybodys).chmod(0o1777)
        place = Path(everybodys) / "kvpool-1000"
        place.mkdir(mode=0o700)
        os.chown(place, STRANGER, STRANGER)
        yield place


@pytest.fixture
def strangers_socket(squatted: Path) -> Iterator[str]:
    """A socket in the squatted directory, served under the stranger's user, who would read what is sent to it."""
    path = str(squatted / "kvpool.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.seteuid(STRANGER)
    try:
        listener.bind(path)
        listener.listen(8)  # SO_PEERCRED reports the user who listens
    finally:
        os.seteuid(0)
    yield path
    received = b""
    while listener in select.select([listener], [], [], 0)[0]:
        accepted, _ = listener.accept()
        with accepted:
            received += accepted.recv(4096)
    listener.close()
    assert received == b""


def test_a_daemon_refuses_a_directory_that_a_stranger_made(squatted: Path) -> None:
    daemon = Daemon(squatted)
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 2
    assert f"server.socket cannot be there: {squatted} belongs to uid {STRANGER}" in daemon.log()
    assert "somebody else may have made it; use another directory" in daemon.log()
    assert [path.name for path in squatted.iterdir()] == ["kvpoold.log"]


def test_a_client_sends_nothing_to_a_strangers_socket(strangers_socket: str) -> None:
    with pytest.raises(DaemonUnreachable, match=f"is served by uid {STRANGER}, expected root"):
        BlockingConnection.admin(strangers_socket, 60.0)
    with kv.connect(strangers_socket, model="m", layout=SMALL) as pool:
        assert not pool.connected


def test_the_command_names_what_is_wrong(strangers_socket: str) -> None:
    ended = CliRunner().invoke(cli, ["info", "--socket", strangers_socket])
    assert ended.exit_code == 3
    assert f"KVPOOL_DAEMON_UID={STRANGER}" in ended.stderr


def test_a_daemons_user_can_be_named(monkeypatch: pytest.MonkeyPatch, squatted: Path) -> None:
    path = str(squatted / "kvpool.sock")
    assert ownership.fault_of_daemon(path, STRANGER)
    monkeypatch.setenv(ownership.DAEMON_UID_VARIABLE, str(STRANGER))
    assert not ownership.fault_of_daemon(path, STRANGER)
    assert ownership.fault_of_daemon(path, STRANGER - 1)


def test_the_owner_of_a_directory_that_only_he_can_have_made_is_trusted(tmp_path: Path) -> None:
    place = Path("/run") / f"kvpool-test-{os.getpid()}"
    place.mkdir()
    try:
        os.chown(place, STRANGER, STRANGER)
        assert not ownership.fault_of_daemon(str(place / "kvpool.sock"), STRANGER)
        assert not ownership.fault_of_owner(str(place))
        assert ownership.fault_of_daemon(str(place / "kvpool.sock"), STRANGER - 1)
    finally:
        place.rmdir()
    assert ownership.fault_of_owner(str(tmp_path / "nowhere")).endswith("is no directory")
