"""Directories of sockets: created where missing, refused where others may write; whether a socket is served, and what a user
lacks to connect."""

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.ownership import is_served, make_socket_directory, missing_right

STRANGER, GROUP = 65534, 4242


@pytest.fixture
def served_place() -> Iterator[Path]:
    """A socket of root and a group without a name, as a user sees it who is neither. Everybody may enter its directory."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    directory = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    directory.chmod(0o755)
    path = directory / "kvpool.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        for place in (path, directory):
            os.chown(place, 0, GROUP)
        yield path
    shutil.rmtree(directory)


JOIN = "be user root, or join the group (usermod --append --groups 4242 "


@pytest.mark.parametrize(
    ("directory_rights", "socket_rights", "lacking", "remedy"),
    [
        (0o755, 0o660, "socket", JOIN),
        (0o755, 0o600, "socket", "be user root, or have that user set server.socket_mode to 0660 and join group 4242"),
        (0o750, 0o660, "directory", JOIN),
        (0o700, 0o660, "directory", "be user root, or have that user chmod g+x {place} and join group 4242"),
    ],
)
def test_what_a_user_lacks_to_connect_is_named_with_its_remedy(
    served_place: Path, directory_rights: int, socket_rights: int, lacking: str, remedy: str
) -> None:
    served_place.chmod(socket_rights)
    served_place.parent.chmod(directory_rights)
    place = served_place if lacking == "socket" else served_place.parent
    rights = socket_rights if lacking == "socket" else directory_rights
    owned = f"{place} belongs to user root and group 4242 with rights {rights:04o}: "
    assert _missing_right_of_stranger(served_place).startswith(owned + remedy.format(place=place))


def test_who_may_connect_lacks_nothing(served_place: Path) -> None:
    served_place.chmod(0o666)
    assert _missing_right_of_stranger(served_place) == ""


def _missing_right_of_stranger(path: Path) -> str:
    os.seteuid(STRANGER)
    try:
        return missing_right(str(path))
    finally:
        os.seteuid(0)


def test_a_directory_is_made_writable_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvpool" / "kvpool.sock"
    assert make_socket_directory(str(path)) == make_socket_directory(str(path), is_private=True) == ""
    assert not stat.S_IMODE(path.parent.stat().st_mode) & 0o022
    assert not path.exists()


@pytest.mark.parametrize(("rights", "remedy"), [(0o775, "chmod go-w {}"), (0o1777, "use another directory")])
def test_a_directory_that_others_may_write_is_not_private(tmp_path: Path, rights: int, remedy: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(rights)
    path = str(tmp_path / "shared" / "kvpool.sock")
    assert make_socket_directory(path) == ""
    assert make_socket_directory(path, is_private=True) == (
        f"{tmp_path}/shared has rights {rights:04o}, expected no more than 0755: {remedy.format(tmp_path / 'shared')}"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_strangers_directory_is_refused_with_a_remedy(tmp_path: Path) -> None:
    place = tmp_path / "open" / "kvpool"
    place.mkdir(parents=True)
    place.parent.chmod(0o1777)
    os.chown(place, 65534, 65534)
    assert "belongs to uid 65534 and lies below a directory where everybody may write" in make_socket_directory(
        f"{place}/kvpool.sock"
    )


def test_a_socket_is_served_while_somebody_accepts(tmp_path: Path) -> None:
    path = str(tmp_path / "kvpool.sock")
    assert not is_served(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert not is_served(path), "bound, and nobody listens"
        listener.listen()
        assert is_served(path)
    assert not is_served(path), "a socket that was left behind"
