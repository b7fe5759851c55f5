"""Directories of sockets: created where missing, refused where others may write, and whether a socket is served."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvpool.ownership import is_served, make_socket_directory


def test_a_directory_is_made_writable_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvpool" / "kvpool.sock"
    assert make_socket_directory(str(path)) == make_socket_directory(str(path), is_private=True) == ""
    assert not stat.S_IMODE(path.parent.stat().st_mode) & 0o022
    assert not path.exists()


def test_a_directory_that_others_may_write_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    path = str(tmp_path / "shared" / "kvpool.sock")
    assert make_socket_directory(path) == ""
    assert make_socket_directory(path, is_private=True) == (
        f"{tmp_path}/shared has rights 0775, expected no more than 0755: chmod go-w {tmp_path}/shared"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_strangers_directory_is_refused_with_a_remedy(tmp_path: Path) -> None:
    place = tmp_path / "open" / "kvpool"
    place.mkdir(parents=True)
    place.parent.chmod(0o1777)
    os.chown(place, 65534, 65534)
    assert "belongs to uid 65534 in a directory where everybody may write" in make_socket_directory(
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
