"""The blocking connection against an unusual peer."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool.errors import DaemonUnreachable, Refused
from kvpool.protocol import blocking
from kvpool.protocol.frames import LENGTH, PIECE_BYTES, decode
from kvpool.protocol.records import messages as m


@pytest.mark.parametrize(
    ("answer", "expected"), [(m.Failure("busy", "all in use"), Refused), (None, DaemonUnreachable)]
)
def test_a_refusal_before_the_hello_was_read_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: m.Failure | None, expected: type[Exception]
) -> None:
    path = str(tmp_path / "socket")
    encode = m.encode
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def refuse_then_encode(record: object, sequence: int) -> bytes:
            """The peer is gone between the client's connect and its first byte."""
            with listener.accept()[0] as accepted:
                if answer is not None:
                    accepted.sendall(encode(answer, 0))
            return encode(record, sequence)

        monkeypatch.setattr(m, "encode", refuse_then_encode)
        with pytest.raises(expected):
            blocking.BlockingConnection.admin(path, 5.0)


def test_a_long_request_arrives_whole_though_the_daemon_reads_it_slowly(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    request = m.Commit(7, random.Random(1).randbytes(3 * PIECE_BYTES), random.Random(2).randbytes(700_000), b"scope")
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as accepted:
            hello = accepted.recv(1 << 16)
            sequence = decode(hello[LENGTH.size :])[1]
            welcome = m.Welcome(bytes(16), "1", b"", 0, 0, 1.0, 1.0, "always", keeps_tokens=True, staging_bytes=0)
            accepted.sendall(m.encode(welcome, sequence))
            size = LENGTH.size + LENGTH.unpack(accepted.recv(LENGTH.size, socket.MSG_PEEK))[0]
            while sum(map(len, received)) < size:
                received.append(accepted.recv(10_000))
            accepted.sendall(m.encode(m.Committed(b"\x07"), 1))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        with ThreadPoolExecutor(1) as daemon:
            served = daemon.submit(serve, listener)
            with blocking.BlockingConnection.admin(path, 30.0) as connection:
                assert connection.call(request, m.Committed) == m.Committed(b"\x07")
            served.result()
    assert b"".join(received) == m.encode(request, 1)
