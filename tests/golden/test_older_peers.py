"""Peers of the version before, from bytes that they once sent: a client against this daemon, a daemon against this client."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.protocol import frames, versions
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.tiers.dram.tier import plan_geometry
from tests.golden import wire
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import payload_of, store, tokens_of

SESSION = wire.session_of("session_1.txt")
TIMEOUT_S = 5.0
# What the daemon of the recording was given, so that the client's memory has the size of the recorded welcome.
RECORDED_DRAM = 1 << 20
# How much happened before differs with what the daemon has done since its start.
VARYING = (em.Events.KIND, em.SnapshotPage.KIND)


def _body(frame: bytes) -> tuple[int, int, list[object]]:
    return frames.decode(frame[frames.LENGTH.size :])


def _next_frame(peer: socket.socket) -> bytes:
    head = peer.recv(frames.LENGTH.size, socket.MSG_WAITALL)
    return head + peer.recv(frames.LENGTH.unpack(head)[0], socket.MSG_WAITALL) if head else b""


def _shape(values: list[object]) -> list[object]:
    """Types of fields, and how long columns are; not what differs from life to life."""
    return [len(value) if isinstance(value, bytes) else type(value) for value in values]


def test_a_client_of_version_1_is_served_as_ever(start_daemon: Callable[..., Daemon]) -> None:
    """Frames as they were sent then, ids and tickets replaced by those of this life, are answered in the same form."""
    daemon = start_daemon(dram__capacity=f"{RECORDED_DRAM}B")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(daemon.socket)
        client.sendall(SESSION[0][1])
        welcome, fds, _, _ = socket.recv_fds(client, 65536, 2)
        for fd in fds:
            os.close(fd)
        assert len(fds) == 2
        assert _shape(_body(welcome)[2]) == _shape(_body(SESSION[1][1])[2])
        ticket: dict[object, object] = {}
        for (_, request), (_, answered) in zip(SESSION[2::2], SESSION[3::2], strict=True):
            kind, sequence, values = _body(request)
            values = [ticket.get(value, value) if isinstance(value, bytes) else value for value in values]
            client.sendall(frames.encode(kind, sequence, values))
            found, expected = _body(_next_frame(client)), _body(answered)
            assert found[:2] == expected[:2], f"{found[2]} to {values}"
            if found[0] in VARYING:
                assert len(found[2]) == len(expected[2])
            else:
                assert _shape(found[2]) == _shape(expected[2])
            if kind == m.IssueTicket.KIND:
                ticket[expected[2][0]] = found[2][0]


class RecordedDaemon:
    """A daemon of version 1: refuses what it never knew, and answers what it was asked then with what it answered then."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "recorded.sock")
        self.unexpected: list[tuple[bytes, bytes]] = []
        self.heard = 0
        *_, arena_bytes, index_bytes = _body(SESSION[1][1])[2][:5]
        geometry = plan_geometry(RECORDED_DRAM, 1 << 30, 0)
        assert (geometry.arena_bytes, geometry.index_bytes) == (arena_bytes, index_bytes)
        self._arena = kvpool_native.Mapping.create("recorded-arena", geometry.arena_bytes)
        self._index = kvpool_native.Mapping.create("recorded-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self._arena, self._index, geometry, bytes(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            with accepted:
                self._talk(accepted)

    def _talk(self, accepted: socket.socket) -> None:
        hello = _next_frame(accepted)
        if len(_body(hello)[2]) != len(_body(SESSION[0][1])[2]):
            accepted.sendall(m.encode(m.Failure("protocol", "Hello has 6 fields, expected 5"), 0))
            return
        self._expect(hello, SESSION[0][1])
        socket.send_fds(accepted, [SESSION[1][1]], [self._arena.fd, self._index.fd])
        for (_, expected), (_, answer) in zip(SESSION[2::2], SESSION[3::2], strict=True):
            while (request := _next_frame(accepted)) and _body(request)[0] == m.Usage.KIND:
                continue
            if not request:
                return
            self._expect(request, expected)
            accepted.sendall(answer)
        accepted.recv(1)

    def _expect(self, request: bytes, expected: bytes) -> None:
        self.heard += 1
        if request != expected:
            self.unexpected.append((request, expected))


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[RecordedDaemon]:
    """A daemon of version 1."""
    with contextlib.closing(RecordedDaemon(tmp_path)) as daemon:
        yield daemon


def test_a_daemon_of_version_1_hears_what_it_always_heard(recorded: RecordedDaemon) -> None:
    with kv.connect(recorded.path, model="test-model", layout=SMALL, timeout_s=TIMEOUT_S) as pool:
        assert pool.connected
        keys = pool.keys(tokens_of(1, 4 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 4
        longer = pool.keys(tokens_of(1, 6 * SMALL.chunk_tokens))
        pool.save(longer, from_=payload_of(longer, SMALL, 4), first_chunk=4).abort()
        assert pool.announce(keys).announced == 4
        assert pool.retain(keys, [kv.TokenRange(0, 64, 80, 60.0)]).accepted == 2
        assert pool.demote(keys).accepted == 4
        lease = pool.acquire(kv.Hit(4, keys.tokens, np.ones(4, np.uint8), keys))
        assert lease.chunks == 4
        with pool.claim(lease.ticket()) as claimed:
            assert claimed.chunks == 4
        lease.release()
        assert pool.events().events
        assert sum(len(part.chunks) for part in pool.snapshot()) == 4
        assert pool.stats()["reconnects"] == 0
    assert recorded.unexpected == []
    assert recorded.heard == 1 + len(SESSION[2::2])


def test_a_client_and_a_daemon_without_a_common_version_part_by_name(daemon: Daemon) -> None:
    hello = m.Hello(m.MAGIC, versions.NEWEST + 3, m.ROLE_ADMIN, "", [], versions.NEWEST + 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(daemon.socket)
        client.sendall(m.encode(hello, 0))
        _, _, values = _body(_next_frame(client))
    assert values[0] == "version"
    assert f"this daemon {versions.OLDEST} to {versions.NEWEST}" in str(values[1])
    wait_until(lambda: daemon.stats()["connections"] == 1, "it has gone")
