"""The daemon's socket as a client finds it: the one that is named, the service's where it can be used, this user's own."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool import socket_path
from kvpool.config.config import load_config
from kvpool.errors import InvalidArgument
from kvpool.socket_path import SOCKET_VARIABLE, default_socket, find_socket, own_socket
from kvpool_client.sglang.settings import Settings as SglangSettings
from kvpool_client.vllm.settings import Settings as VllmSettings
from tests.rigs.daemon import SMALL

STRANGER, GROUP = 65534, 4242


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The paths of the service's socket and of this user's own, in directories that everybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    service, own = folder / "service" / "kvpool.sock", folder / "runtime" / "kvpool" / "kvpool.sock"
    for place in (service, own):
        place.parent.mkdir(parents=True)
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o755)
    monkeypatch.setattr(socket_path, "SERVICE_SOCKET", str(service))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    yield service, own
    shutil.rmtree(folder)


def _as_stranger(find: Callable[[], str]) -> str:
    os.seteuid(STRANGER)
    try:
        return find()
    finally:
        os.seteuid(0)


def _bind(path: Path, rights: int = 0o666) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.chmod(rights)


def test_without_any_socket_the_services_is_awaited(places: tuple[Path, Path]) -> None:
    assert find_socket() == str(places[0])


def test_the_services_socket_is_found_before_the_users_own(places: tuple[Path, Path]) -> None:
    service, own = places
    _bind(own)
    assert find_socket() == str(own)
    _bind(service)
    assert find_socket() == str(service)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_who_may_not_write_the_services_directory_finds_its_socket(places: tuple[Path, Path]) -> None:
    service, own = places
    _bind(service)
    assert _as_stranger(find_socket) == str(service)
    assert _as_stranger(default_socket) == str(own), "a daemon of this user makes its own"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_service_without_the_right_to_it_yields_to_the_users_own_alone(places: tuple[Path, Path]) -> None:
    service, own = places
    _bind(service, 0o660)
    os.chown(service, 0, GROUP)
    assert _as_stranger(find_socket) == str(service), "its rights are what the message is about"
    _bind(own)
    assert _as_stranger(find_socket) == str(own)


@pytest.mark.parametrize("runtime", ["relative", "long"])
def test_a_runtime_directory_that_can_have_no_socket_is_passed_over(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    folder = places[0].parents[1]
    long = folder / ("d" * 100)
    long.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(socket_path, "SERVICE_SOCKET", str(folder / "nowhere" / "kvpool.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "runtime" if runtime == "relative" else str(long))
    monkeypatch.setenv("RUNTIME_DIRECTORY", "runtime" if runtime == "relative" else str(long))
    own = f"/tmp/kvpool-{os.getuid()}/kvpool.sock"
    assert (default_socket(), own_socket()) == (own, own)
    assert load_config().server.socket == own


def test_the_environment_names_it_for_every_client(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _bind(places[0])
    monkeypatch.setenv(SOCKET_VARIABLE, "/elsewhere/kvpool.sock")
    assert find_socket() == "/elsewhere/kvpool.sock"
    assert VllmSettings.of({}).socket == "/elsewhere/kvpool.sock"
    assert VllmSettings.of({"kvpool.socket": "/given.sock"}).socket == "/given.sock"
    assert SglangSettings(model="m").socket == "/elsewhere/kvpool.sock"
    monkeypatch.setenv(SOCKET_VARIABLE, "unix:///elsewhere/kvpool.sock")
    with pytest.raises(
        InvalidArgument, match=r"path is 'unix:///elsewhere/kvpool.sock', expected a path without a sch"
    ):
        kv.connect(model="m", layout=SMALL)


def test_a_pool_without_a_path_is_on_the_socket_that_is_found(places: tuple[Path, Path]) -> None:
    with kv.connect(model="m", layout=SMALL, timeout_s=0.1) as pool:
        assert str(places[0]) in str(pool.stats()["last_error"])


@pytest.mark.parametrize(
    ("made", "socket"),
    [("/run/kvpool2", "/run/kvpool2/kvpool.sock"), ("", None), ("run/kvpool2", None), ("/run/a:/run/b", None)],
)
def test_a_daemon_serves_in_the_one_directory_that_its_service_manager_has_made(
    monkeypatch: pytest.MonkeyPatch, made: str, socket: str | None
) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    without = default_socket()
    monkeypatch.setenv("RUNTIME_DIRECTORY", made)
    assert default_socket() == (socket or without)


def test_a_socket_is_named_by_text_or_a_path_wherever_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.sock"
    with kv.connect(path, model="m", layout=SMALL) as pool:
        assert not pool.connected
    assert VllmSettings.of({"kvpool.socket": path}).socket == str(path)
    assert SglangSettings.read({"interface_v1": 1, "socket": path}, "m").socket == str(path)
