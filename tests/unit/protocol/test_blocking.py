"""The blocking connection against an unusual peer."""

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.errors import DaemonUnreachable, ProtocolError, Refused
from kvpool.protocol import blocking
from kvpool.protocol.frames import LENGTH, decode
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


@contextmanager
def _connected(folder: Path) -> Iterator[tuple[blocking.BlockingConnection, socket.socket]]:
    """A connection, and its peer's end, which has sent the welcome."""
    path = str(folder / "socket")
    welcome = m.Welcome(bytes(16), "1", b"", 0, 0, 1.0, 1.0, "always", keeps_tokens=True, staging_bytes=0)

    def greet(listener: socket.socket) -> socket.socket:
        accepted = listener.accept()[0]
        accepted.recv(1 << 16)
        accepted.sendall(m.encode(welcome, 0))
        return accepted

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as daemon:
        listener.bind(path)
        listener.listen()
        greeted = daemon.submit(greet, listener)
        with blocking.BlockingConnection.admin(path, 60.0) as connection, greeted.result() as peer:
            yield connection, peer


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        (b"", DaemonUnreachable, "no answer to AskInfo: the daemon did not answer in time"),
        (m.encode(m.Done(), 1)[:-1], DaemonUnreachable, "no answer to AskInfo: the daemon did not answer in time"),
        (m.encode(m.Done(), 1), ProtocolError, "answer is kind 4 number 1, expected Report number 1"),
        (m.encode(m.Report({}), 2), ProtocolError, "answer is kind 34 number 2, expected Report number 1"),
        (m.encode(m.Report({}), 1) + b"more", ProtocolError, "answer is followed by 4 unexpected bytes"),
        (bytes(4), ProtocolError, "frame announces 0 bytes, expected 2..1048576"),
        (b"\xff" * 4, ProtocolError, "frame announces 4294967295 bytes, expected 2..1048576"),
        (LENGTH.pack(3) + b"\x93\x22\x01", ProtocolError, "is not msgpack of this protocol"),
        (m.encode(m.Failure("busy", "all in use"), 9), Refused, "all in use"),
    ],
)
def test_what_is_no_answer_is_an_error_that_says_so(
    tmp_path: Path, answer: bytes, expected: type[Exception], text: str
) -> None:
    with _connected(tmp_path) as (connection, peer):
        peer.sendall(answer)
        with pytest.raises(expected) as raised:
            connection.call(m.AskInfo(), m.Report, 0.05 if expected is DaemonUnreachable else None)
        assert text in str(raised.value)


def test_a_daemon_that_closes_the_connection_has_not_answered(tmp_path: Path) -> None:
    with _connected(tmp_path) as (connection, peer):
        peer.close()
        for _ in range(2):
            with pytest.raises(DaemonUnreachable, match="no answer to AskInfo: the daemon closed the connection"):
                connection.info()


@pytest.mark.parametrize("given", [0, 2])
def test_an_answer_with_another_number_of_descriptors_is_refused_and_they_are_closed(
    tmp_path: Path, given: int
) -> None:
    with _connected(tmp_path) as (connection, peer):
        before = os.listdir("/proc/self/fd")
        frame = m.encode(m.Done(), 1)
        socket.send_fds(peer, [frame], [peer.fileno()] * given)
        with pytest.raises(ProtocolError, match=f"the answer came with {given} descriptors, expected 1"):
            connection.call_for_descriptor(m.AskInfo(), m.Done)
        assert os.listdir("/proc/self/fd") == before


def test_descriptors_of_an_answer_that_never_ends_are_closed_at_once(tmp_path: Path) -> None:
    with _connected(tmp_path) as (connection, peer):
        before = os.listdir("/proc/self/fd")
        socket.send_fds(peer, [m.encode(m.Done(), 1)[:2]], [peer.fileno()])
        with pytest.raises(DaemonUnreachable, match="did not answer in time"):
            connection.call_for_descriptor(m.AskInfo(), m.Done, 0.05)
        assert os.listdir("/proc/self/fd") == before


def test_sockets_of_a_process_that_has_given_all_of_them_a_time_are_waited_for(tmp_path: Path) -> None:
    socket.setdefaulttimeout(30.0)  # makes the descriptors of new ones not block
    try:
        with _connected(tmp_path) as (connection, peer):
            timer = threading.Timer(0.05, lambda: peer.sendall(m.encode(m.Done(), 1)))
            timer.start()
            assert connection.call(m.AskInfo(), m.Done) == m.Done()
            timer.join()
    finally:
        socket.setdefaulttimeout(None)


def test_a_signal_is_handled_while_a_request_waits(tmp_path: Path) -> None:
    handled: list[int] = []
    may_raise: list[bool] = []

    def answer(number: int, _: object) -> None:
        handled.append(number)
        if len(handled) == 2:
            peer.sendall(m.encode(m.Done(), 1))
        if may_raise:
            may_raise.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, answer)
    try:
        with _connected(tmp_path) as (connection, peer):
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            assert connection.call(m.AskInfo(), m.Done) == m.Done()

            def ask_until_interrupted() -> None:
                may_raise.append(True)
                connection.call(m.AskInfo(), m.Done)

            with pytest.raises(KeyboardInterrupt):
                ask_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(handled) >= 3


def test_a_long_request_arrives_whole_though_the_daemon_reads_it_slowly(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    request = m.Commit(7, random.Random(1).randbytes(50_000), random.Random(2).randbytes(700_000), b"scope")
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
