"""Handshakes that are slow, cut, doubled, pipelined or carry unexpected data."""

import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from kvpool.protocol.frames import LENGTH
from kvpool.protocol.records import messages as m
from tests.hostile.rigs.daemon_watch import assert_never_internal, fds_at_rest, open_fds
from tests.hostile.rigs.raw_clients import (
    HELLO,
    answers_until_eof,
    engine,
    keys_of,
    next_answer,
    raw_engine,
    raw_socket,
    read_back,
    store,
)
from tests.rigs.daemon import SMALL, Daemon, wait_until


def _first_failure(raw: socket.socket) -> str:
    kind, _, values = answers_until_eof(raw)[0]
    assert kind == m.Failure.KIND
    return str(values[0])


def _first_answer(raw: socket.socket) -> tuple[int, int]:
    """The kind of the first answer, which comes in one piece, and how many descriptors come with it."""
    data, fds, _, _ = socket.recv_fds(raw, 65536, 8)
    for fd in fds:
        os.close(fd)
    return int(msgpack.unpackb(data[LENGTH.size :])[0]), len(fds)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, len(HELLO) - 1])
def test_a_hello_may_arrive_in_pieces(shared_daemon: Daemon, size: int) -> None:
    with raw_socket(shared_daemon) as raw:
        for at in range(0, len(HELLO), size):
            raw.sendall(HELLO[at : at + size])
        kind, count = _first_answer(raw)
        assert (kind, count) == (m.Welcome.KIND, 2)


def test_requests_behind_the_hello_in_one_segment_are_answered_in_order(shared_daemon: Daemon) -> None:
    with engine(shared_daemon) as good:
        store(good, keys_of(0, 3))
    requests = [m.encode(m.Acquire(keys_of(0, 3)), number) for number in range(1, 40)]
    with raw_engine_with(shared_daemon, HELLO + b"".join(requests)) as raw:
        answers = [next_answer(raw) for _ in requests]
        assert [sequence for _, sequence, _ in answers] == list(range(1, 40))
        assert {(kind, values[1]) for kind, _, values in answers} == {(m.Leased.KIND, 3)}


def raw_engine_with(daemon: Daemon, data: bytes) -> socket.socket:
    """A socket on which `data`, a hello in front, has been sent at once, and the welcome alone been received."""
    raw = raw_socket(daemon)
    raw.sendall(data)
    head, fds, _, _ = socket.recv_fds(raw, LENGTH.size, 2)
    for fd in fds:
        os.close(fd)
    assert len(raw.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)) == LENGTH.unpack(head)[0]
    return raw


def test_two_hellos_are_one_too_many(shared_daemon: Daemon) -> None:
    with raw_engine_with(shared_daemon, HELLO + HELLO) as raw:
        assert _first_failure(raw) == "protocol"


def test_requests_in_front_of_a_bad_frame_are_still_answered(shared_daemon: Daemon) -> None:
    bad = LENGTH.pack(2) + b"\xc1\xc1"
    with raw_engine(shared_daemon) as raw:
        raw.sendall(b"".join(m.encode(m.Renew(b""), number) for number in (7, 8)) + bad + m.encode(m.Renew(b""), 9))
        answers = answers_until_eof(raw)
    assert [(kind, sequence) for kind, sequence, _ in answers] == [
        (m.Done.KIND, 7),
        (m.Done.KIND, 8),
        (m.Failure.KIND, 0),
    ]


def _hello(
    wire: list[Any],
    *,
    model: str = "m",
    magic: bytes = m.MAGIC,
    version: int = m.PROTOCOL_VERSION,
    ended: bytes = b"",
) -> bytes:
    return m.encode(m.Hello(magic, version, m.ROLE_ENGINE, model, wire, ended=ended), 0)


NO_LAYOUTS: list[list[Any]] = [
    [[[]]] * 10,
    [1, 1, 1 << 40, "int8", 1, 1, 0, 1, "", 0],
    [1024, 65536, 65536, "int8", 1 << 20, 2, 0, 1, "", 0],
    [1, 1, 1, "int8", 1, 1, 7, 3, "", 0],
    [1, 1, 1, "int8", 1, 1, 0, 1, "x" * 257, 1],
    [True, 1, 1, "int8", 1, 1, 0, 1, "", 0],
    [2, 1 << 14, 1 << 14, "int8", 1, 1, 0, 1, "", 0],
    *(
        [*SMALL.to_wire(), [], "", entries]
        for entries in ([], [[1, 1]], [[1, 3]], [[1, 1 << 40]], [[2, 2]], [[1, 2], [1, 2]], [[[1]] * 2])
    ),
]
NESTED = b"\x9a\x01\x00\xc4\x04KVPL\x01\xa6engine\xa1m\x9a" + b"\x91" * 500 + b"\x01" * 11 + b"\xc4\x00\xc4\x00"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (LENGTH.pack(0), "protocol"),
        (LENGTH.pack(4097) + b"x" * 4097, "protocol"),
        (LENGTH.pack((1 << 32) - 1), "protocol"),
        (m.encode(m.Acquire(b"k" * 32), 0), "protocol"),
        (LENGTH.pack(3) + b"\x91\x91\x91", "protocol"),
        (_hello([], magic=b""), "protocol"),
        (_hello([], version=-1), "version"),
        (_hello(SMALL.to_wire(), ended=b"x" * 21), "protocol"),
        (_hello(SMALL.to_wire(), ended=b"x" * 20 * (m.ENDED_MAX + 1)), "protocol"),
        (_hello(SMALL.to_wire(), model="m" * 513), "model"),
        *((_hello(wire), "layout") for wire in NO_LAYOUTS),
        (LENGTH.pack(len(NESTED)) + NESTED, "layout"),
    ],
)
def test_a_first_frame_that_is_no_valid_hello_is_refused_by_name(shared_daemon: Daemon, data: bytes, code: str) -> None:
    with raw_socket(shared_daemon) as raw:
        raw.sendall(data)
        assert _first_failure(raw) == code
    assert_never_internal(shared_daemon)


@pytest.mark.parametrize("cut", [0, 1, 4, 5, len(HELLO) - 1])
def test_a_hello_cut_off_is_refused_and_forgotten(shared_daemon: Daemon, cut: int) -> None:
    fds = fds_at_rest(shared_daemon)
    with raw_socket(shared_daemon) as raw:
        raw.sendall(HELLO[:cut])
        raw.shutdown(socket.SHUT_WR)
        assert _first_failure(raw) == "protocol"
    wait_until(lambda: open_fds(shared_daemon) <= fds, "the socket is closed")


def test_a_client_gone_before_its_welcome_leaves_nothing(shared_daemon: Daemon) -> None:
    fds = fds_at_rest(shared_daemon)
    for _ in range(50):
        with raw_socket(shared_daemon) as raw:
            raw.sendall(HELLO)
    wait_until(lambda: shared_daemon.stats()["connections"] == 1, "they are all gone")
    wait_until(lambda: open_fds(shared_daemon) <= fds, "their sockets are closed")
    assert_never_internal(shared_daemon)


@pytest.mark.parametrize("when", ["with the hello", "in the hello", "later", "with a bad frame"])
def test_descriptors_that_a_client_passes_are_not_taken(shared_daemon: Daemon, when: str) -> None:
    fds = fds_at_rest(shared_daemon)
    passed = [os.memfd_create(f"hostile-{number}") for number in range(100)]
    with raw_socket(shared_daemon) if when != "later" else raw_engine(shared_daemon) as raw:
        if when == "with the hello":
            socket.send_fds(raw, [HELLO], passed)
        elif when == "in the hello":
            for at in range(len(HELLO)):
                socket.send_fds(raw, [HELLO[at : at + 1]], passed[at : at + 1])
        elif when == "later":
            for number in range(20):
                socket.send_fds(raw, [m.encode(m.Renew(b""), number)], passed)
                assert next_answer(raw)[:2] == (m.Done.KIND, number)
        else:
            socket.send_fds(raw, [LENGTH.pack(0)], passed)
        if when.endswith("hello"):
            assert _first_answer(raw)[0] == m.Welcome.KIND
        wait_until(lambda: open_fds(shared_daemon) <= fds + 1, "the daemon has the connection's descriptor alone")
    wait_until(lambda: open_fds(shared_daemon) <= fds, "and not even that")
    for fd in passed:
        os.close(fd)


@pytest.mark.timed
def test_slow_handshakes_end_in_time_and_do_not_block_others(start_daemon: Callable[..., Daemon]) -> None:
    timeout_s = 1.0
    daemon = start_daemon(server__handshake_timeout=f"{timeout_s:.0f}s")
    fds = fds_at_rest(daemon)
    begun_s = time.monotonic()
    slow = [raw_socket(daemon) for _ in range(300)]
    connected_s = time.monotonic() - begun_s
    poll = select.poll()
    by_fd = {raw.fileno(): raw for raw in slow}
    for raw in slow:
        poll.register(raw, select.POLLIN | select.POLLHUP)
    sent, ended_s = 0, []
    with engine(daemon) as good:
        store(good, keys_of(0, 4))
        while by_fd:
            assert time.monotonic() - begun_s < 20 * timeout_s
            for fd, _ in poll.poll(100):
                ended_s.append(time.monotonic() - begun_s)
                poll.unregister(fd)
                by_fd.pop(fd)
            # A byte each, every 100 ms: none of them ever completes its hello.
            for raw in by_fd.values():
                with contextlib.suppress(ConnectionError):
                    raw.send(HELLO[sent : sent + 1])
            sent += 1
            assert sent < len(HELLO)
            assert read_back(good, keys_of(0, 4)) == [True] * 4
        with engine(daemon) as another:
            assert read_back(another, keys_of(0, 4)) == [True] * 4
    print(f"{len(slow)} connected in {connected_s:.2f} s, ended {min(ended_s):.2f} to {max(ended_s):.2f} s")
    assert min(ended_s) > 0.9 * timeout_s
    assert max(ended_s) < connected_s + 5 * timeout_s
    for raw in slow:
        raw.close()
    wait_until(lambda: open_fds(daemon) <= fds, "their sockets are closed")


def test_hellos_of_many_ranks_do_not_delay_the_daemon(start_daemon: Callable[..., Daemon], seed: int) -> None:
    """A scheduler's hello names a namespace for each rank: it is refused whole where they do not all fit."""
    daemon = start_daemon()
    wire = [*SMALL.to_wire()[:6], -1, 1000, "", 0]
    chance = random.Random(seed)
    codes = []
    with contextlib.ExitStack() as stack:
        for number in range(6):
            raw = stack.enter_context(raw_socket(daemon))
            hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, f"model-{number}-{chance.random()}", wire)
            raw.sendall(m.encode(hello, 0))
            kind, _, values = next_answer(raw)
            codes.append(values[0] if kind == m.Failure.KIND else "welcome")
        assert codes == ["welcome"] * 4 + ["full"] * 2
        assert daemon.stats()["namespaces"] == 4000
    with engine(daemon) as good:
        store(good, keys_of(0, 3))
        assert read_back(good, keys_of(0, 3)) == [True] * 3
