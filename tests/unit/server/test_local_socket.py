"""Accepting, when the system has nothing to accept with."""

import asyncio
import errno
import logging
import socket
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.protocol.records import messages as m
from kvpool.server.connections import local_socket as module
from kvpool.server.connections.local_socket import AcceptedHello, LocalSocket, Peer
from kvpool.server.connections.roster import Roster


def _nobody(hello: m.Hello, peer: Peer) -> AcceptedHello:
    raise AssertionError("nobody connects")


async def _adopt(accepted: socket.socket, hello: m.Hello, peer: Peer, welcome: m.Welcome) -> None:
    raise AssertionError("nobody connects")


def _accept(path: Path, errors: list[Exception], monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Accept while the system answers with `errors`, one after the other; what was reported as the end of it."""
    monkeypatch.setattr(module, "_ACCEPT_PAUSE_S", 0.0)
    failures: list[BaseException] = []

    async def run() -> None:
        loop, left = asyncio.get_running_loop(), list(errors)

        async def sock_accept(_: socket.socket) -> tuple[socket.socket, object]:
            if left:
                raise left.pop(0)
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        listener = LocalSocket(str(path), mode=0o600, handshake_timeout_s=1.0, on_refused=lambda *_: None)
        listener.start(_nobody, _adopt, Roster(5, 1.0, MonotonicClock(), lambda _: False), failures.append)
        for _ in range(20):
            await asyncio.sleep(0)
        await listener.stop(is_clean=True)

    asyncio.run(run())
    return failures


def test_accepting_pauses_and_goes_on_when_resources_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = [OSError(errno.EMFILE, "no descriptors"), OSError(errno.ENFILE, "none at all"), MemoryError()]
    with caplog.at_level(logging.WARNING):
        assert _accept(tmp_path / "kvpool.sock", short, monkeypatch) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("accepting pauses: [Errno 24] no descriptors; the process may have ")
    assert line.endswith(" file descriptors: raise the limit (ulimit -n, LimitNOFILE)")


def test_a_permanent_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EBADF, "gone")
    assert _accept(tmp_path / "kvpool.sock", [error], monkeypatch) == [error]
