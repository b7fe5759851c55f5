"""Clients that do not read, do not stop, stop half-way, or ask for everything: they only affect themselves."""

import contextlib
import random
import select
import signal
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvpool.protocol.frames import FRAME_BYTES_MAX, LENGTH
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.daemon_watch import (
    assert_never_internal,
    assert_nothing_is_left,
    fds_at_rest,
    private_bytes,
    spent_s,
)
from tests.hostile.rigs.raw_clients import (
    answers_until_eof,
    engine,
    hello_of,
    keys_of,
    next_answer,
    raw_engine,
    read_back,
    reserve,
    store,
)
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.dropping import drop_leases

GROWTH_BYTES_MAX = 16 << 20


def _push(raw: socket.socket, data: bytes, size_max: int) -> int:
    """Send `data` repeatedly until nothing is read for a while; the number of bytes read."""
    raw.setblocking(False)
    sent = 0
    while sent < size_max and select.select([], [raw], [], 0.5)[1]:
        with contextlib.suppress(BlockingIOError):
            sent += raw.send(data[sent % len(data) :])
    raw.settimeout(60.0)
    return sent


@pytest.mark.parametrize(
    ("role", "request_"),
    [
        pytest.param(m.ROLE_ADMIN, m.AskStats(), marks=pytest.mark.slow),
        pytest.param(m.ROLE_ADMIN, m.AskInfo(), marks=pytest.mark.slow),
        (m.ROLE_ADMIN, m.Check()),
        pytest.param(m.ROLE_ENGINE, m.IssueTicket(1), marks=pytest.mark.slow),
        (m.ROLE_ENGINE, m.Acquire(keys_of(0, 40))),
        (m.ROLE_ENGINE, m.ReportCorrupt(1, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_client_that_reads_no_answers_is_served_no_further(daemon: Daemon, role: str, request_: object) -> None:
    before, fds = private_bytes(daemon), fds_at_rest(daemon)
    requests = m.encode(request_, 5) * 1000
    with engine(daemon) as good:
        store(good, keys_of(0, 40))
        with raw_engine(daemon, hello_of(role=role)) as raw:
            sent = _push(raw, requests, size_max=64 << 20)
            assert sent < 64 << 20, "the daemon went on taking requests"
            grown = private_bytes(daemon) - before
            print(f"{sent} bytes were taken, the daemon grew by {grown}")
            assert grown < GROWTH_BYTES_MAX
            assert read_back(good, keys_of(0, 40)) == [True] * 40
            wait_until(lambda: spent_s(daemon) < 0.1, "it waits without spinning, once what was sent is served")
            # A client that reads again is served again, in order.
            received = [next_answer(raw) for _ in range(50)]
            assert {sequence for _, sequence, _ in received} == {5}
    assert_nothing_is_left(daemon, fds=fds)
    assert_never_internal(daemon)


def test_a_client_that_reads_no_answers_does_not_delay_the_stop(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__stop_timeout="600s")
    with raw_engine(daemon, hello_of(role=m.ROLE_ADMIN)) as raw:
        _push(raw, m.encode(m.AskStats(), 1) * 1000, size_max=64 << 20)
        assert daemon.stop(60.0) == 0


FLOODS = {
    "drop": m.encode(one_way.DropLeases(struct.pack("<Q", 1) * m.RENEWALS_MAX), 0),
    "acquire": m.encode(m.Acquire(keys_of(900, 1)), 1),
    "renew": m.encode(m.Renew(struct.pack("<Q", 1) * m.RENEWALS_MAX), 1),
    "commit": m.encode(m.Commit(1, bytes(12), b""), 1),
    "claim": m.encode(m.Claim(b"t" * 32), 1),
}


@pytest.mark.timed
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_requests_does_not_delay_others(daemon: Daemon, name: str) -> None:
    floods = [raw_engine(daemon) for _ in range(3)]
    data = FLOODS[name] * max(1, (256 << 10) // len(FLOODS[name]))
    quiet_ms: list[float] = []
    flooded_ms: list[float] = []
    with engine(daemon) as good:
        store(good, keys_of(0, 16))
        for number in range(60):
            is_flooded = number >= 20
            for raw in floods if is_flooded else ():
                raw.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        raw.send(data)
                with contextlib.suppress(BlockingIOError):
                    while raw.recv(1 << 20):
                        pass
            begun_s = time.perf_counter()
            leased = good.call(m.Acquire(keys_of(0, 16)), m.Leased)
            (flooded_ms if is_flooded else quiet_ms).append((time.perf_counter() - begun_s) * 1e3)
            drop_leases(good, leased.lease)
    for raw in floods:
        raw.close()
    print(
        f"{name}: acquire {np.median(quiet_ms):.2f} ms quiet, {np.median(flooded_ms):.2f} ms flooded, "
        f"worst {max(flooded_ms):.2f} ms"
    )
    assert np.median(flooded_ms) < 20.0
    assert_never_internal(daemon)


def test_half_closed_connections_get_their_answers_and_end(daemon: Daemon) -> None:
    fds = fds_at_rest(daemon)
    with engine(daemon) as good:
        store(good, keys_of(0, 3))
    with raw_engine(daemon) as raw:
        raw.sendall(b"".join(m.encode(m.Acquire(keys_of(0, 3)), number) for number in range(1, 100)))
        raw.shutdown(socket.SHUT_WR)
        answers = answers_until_eof(raw)
    assert [sequence for _, sequence, _ in answers] == list(range(1, 100))
    assert_nothing_is_left(daemon, fds=fds)


def test_a_connection_closed_for_reading_ends_without_harm(daemon: Daemon) -> None:
    fds = fds_at_rest(daemon)
    with raw_engine(daemon) as raw:
        raw.shutdown(socket.SHUT_RD)
        with contextlib.suppress(BrokenPipeError):
            for number in range(1000):
                raw.sendall(m.encode(m.IssueTicket(number), number))
    assert_nothing_is_left(daemon, fds=fds)
    assert_never_internal(daemon)


def test_slots_of_a_refused_connection_stay_reserved_until_it_has_closed(daemon: Daemon) -> None:
    with raw_engine(daemon) as raw, engine(daemon) as good:
        raw.sendall(m.encode(reserve_chain(b"", keys_of(0, 3)), 1))
        assert next_answer(raw)[0] == m.Reserved.KIND
        raw.sendall(LENGTH.pack(2) + b"\xc1\xc1")
        assert answers_until_eof(raw)[0][2][0] == "protocol"
        raw.sendall(m.encode(one_way.DropReservations(struct.pack("<Q", 1)), 0))
        assert set(reserve(good, keys_of(0, 1)).states) == {SaveState.PENDING}
        assert daemon.stats()["reservations"] == 1
    wait_until(lambda: daemon.stats()["reservations"] == 0, "its end frees them")
    assert daemon.problems() == []


def test_frames_that_never_end_are_bounded(daemon: Daemon) -> None:
    before = private_bytes(daemon)
    clients = [raw_engine(daemon) for _ in range(20)]
    for raw in clients:
        raw.sendall(LENGTH.pack(FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX - 1))
    with engine(daemon) as good:
        store(good, keys_of(0, 3))
        assert private_bytes(daemon) - before < 20 * 2 * FRAME_BYTES_MAX + (16 << 20)
        for raw in clients:
            raw.close()
        assert read_back(good, keys_of(0, 3)) == [True] * 3
    assert_nothing_is_left(daemon, fds=fds_at_rest(daemon))


def test_clients_killed_and_stopped_at_random_leave_no_holds(daemon: Daemon, seed: int) -> None:
    chance, fds = random.Random(seed), fds_at_rest(daemon)
    for number in range(60):
        with raw_engine(daemon) as raw:
            for _ in range(chance.randrange(1, 5)):
                raw.sendall(m.encode(reserve_chain(b"", keys_of(chance.randrange(50), 2)), number))
                raw.sendall(m.encode(m.Acquire(keys_of(0, 2)), number))
            linger = struct.pack("ii", 1, 0)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert_nothing_is_left(daemon, fds=fds)
    assert_never_internal(daemon)
    daemon.signal(signal.SIGTERM)
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 0
