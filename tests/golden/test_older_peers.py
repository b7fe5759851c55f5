"""Peers of earlier versions, by frames as they sent them: engines are refused by name, operators are served."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol import frames, versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from tests.golden import wire
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import tokens_of

TIMEOUT_S = 5.0
HELLO_FIELDS = {1: 5, 2: 6}


def _body(frame: bytes) -> tuple[int, int, list[object]]:
    return frames.decode(frame[frames.LENGTH.size :])


def _next_frame(peer: socket.socket) -> bytes:
    head = peer.recv(frames.LENGTH.size, socket.MSG_WAITALL)
    return head + peer.recv(frames.LENGTH.unpack(head)[0], socket.MSG_WAITALL) if head else b""


def _hello(version: int, role: str) -> bytes:
    """The hello of a client of this version."""
    layout: list[object] = list(SMALL.to_wire()) if role == m.ROLE_ENGINE else []
    fields = [m.MAGIC, version, role, "test-model" if layout else "", layout, 1]
    return frames.encode(m.Hello.KIND, 0, fields[: HELLO_FIELDS[version]])


@contextlib.contextmanager
def _answered(daemon: Daemon, hello: bytes) -> Iterator[tuple[socket.socket, tuple[int, int, list[object]]]]:
    """A connection that has sent a hello, and what the daemon answered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(daemon.socket)
        client.sendall(hello)
        yield client, _body(_next_frame(client))


@pytest.mark.parametrize("version", HELLO_FIELDS)
def test_an_engine_of_an_earlier_version_is_refused_with_a_remedy(shared_daemon: Daemon, version: int) -> None:
    with _answered(shared_daemon, _hello(version, m.ROLE_ENGINE)) as (client, (kind, _, values)):
        assert (kind, values[0]) == (m.Failure.KIND, "version")
        expected = f"client speaks protocol 1 to {version}, this daemon 3 to {versions.NEWEST}: update the client"
        assert expected in str(values[1])
        assert client.recv(1) == b""


@pytest.mark.parametrize("version", HELLO_FIELDS)
def test_an_operator_of_an_earlier_version_is_served_as_before(shared_daemon: Daemon, version: int) -> None:
    """Frames as they were sent then are answered in the form of then."""
    known = wire.frames_of(version)
    with _answered(shared_daemon, _hello(version, m.ROLE_ADMIN)) as (client, (kind, _, values)):
        assert (kind, len(values)) == (m.Welcome.KIND, len(_body(known["Welcome"][1])[2]))
        for request in ("AskInfo", "AskStats", "Check"):
            client.sendall(known[request][1])
            kind, sequence, values = _body(_next_frame(client))
            assert (kind, sequence) == (m.Report.KIND, wire.SEQUENCE)
            assert [type(value) for value in values] == [dict]


def test_an_engine_whose_hello_has_no_name_is_served(shared_daemon: Daemon) -> None:
    fields = [m.MAGIC, 12, m.ROLE_ENGINE, "test-model", SMALL.to_wire(), versions.oldest_of("engine")]
    with _answered(shared_daemon, frames.encode(m.Hello.KIND, 0, fields)) as (_, (kind, _, values)):
        assert kind == m.Welcome.KIND
        assert len(values) == len(_body(wire.frames_of(12)["Welcome"][1])[2])


class EarlierDaemon:
    """A daemon of an earlier version, as far as an engine's client of this one gets: it refuses the hello as it did then."""

    def __init__(self, directory: Path, version: int) -> None:
        self.path = str(directory / "earlier.sock")
        self.hellos: list[int] = []
        self._version = version
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            with accepted, contextlib.suppress(OSError):
                values = _body(_next_frame(accepted))[2]
                self.hellos.append(len(values))
                accepted.sendall(m.encode(self._refusal(values), 0))
                accepted.recv(1)

    def _refusal(self, values: list[object]) -> m.Failure:
        if len(values) != HELLO_FIELDS[self._version]:
            return m.Failure("protocol", f"Hello has {len(values)} fields, expected {HELLO_FIELDS[self._version]}")
        spoken = f"client speaks protocol {values[5]} to {values[1]}, this daemon 1 to 2"
        return m.Failure("version", f"{spoken}: update the older of the two")


@pytest.mark.parametrize("version", HELLO_FIELDS)
def test_an_engine_of_this_version_misses_at_a_daemon_of_an_earlier_one(tmp_path: Path, version: int) -> None:
    with contextlib.closing(EarlierDaemon(tmp_path, version)) as daemon:
        with kv.connect(daemon.path, model="test-model", layout=SMALL, timeout_s=TIMEOUT_S) as pool:
            assert not pool.connected
            assert pool.lookup(pool.keys(tokens_of(1, 4 * SMALL.chunk_tokens))).chunks == 0
        assert set(daemon.hellos) == {7, 6}
        hello = m.Hello(
            m.MAGIC, versions.NEWEST, m.ROLE_ENGINE, "test-model", SMALL.to_wire(), versions.oldest_of("engine")
        )
        with pytest.raises(Refused, match="update") as refusal:
            BlockingConnection(daemon.path, hello, TIMEOUT_S)
        assert refusal.value.code == "version"


@pytest.mark.parametrize(
    ("since", "change"), [(7, {"head_dim": 32, "summaries": "mean"}), (8, {"head_groups": 2})], ids=str
)
def test_a_newer_layout_is_asked_of_no_daemon_of_an_earlier_version(
    tmp_path: Path, since: int, change: dict[str, Any]
) -> None:
    """It could not read the layout: the engine runs without the pool, and the reason names the daemon."""
    layout = replace(SMALL, **change)
    assert versions.oldest_for(layout) == since > versions.oldest_for(SMALL) == versions.oldest_of("engine")
    with contextlib.closing(EarlierDaemon(tmp_path, 2)) as daemon:
        with kv.connect(daemon.path, model="test-model", layout=layout, timeout_s=TIMEOUT_S) as pool:
            assert not pool.connected
            assert f"client speaks protocol {since} to {versions.NEWEST}" in str(pool.stats()["last_error"])
        assert set(daemon.hellos) == {7, 6}


def test_a_client_and_a_daemon_without_a_common_version_refuse_by_name(daemon: Daemon) -> None:
    hello = m.Hello(m.MAGIC, versions.NEWEST + 3, m.ROLE_ADMIN, "", [], versions.NEWEST + 2)
    with _answered(daemon, m.encode(hello, 0)) as (_, (_, _, values)):
        assert values[0] == "version"
        assert f"this daemon {versions.OLDEST} to {versions.NEWEST}" in str(values[1])
    wait_until(lambda: daemon.stats()["connections"] == 1, "it has gone")
