"""Many connections, and more than the limit: accepted ones are served, the others get a refusal or wait."""

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.daemon_watch import (
    assert_never_internal,
    assert_nothing_is_left,
    cpu_seconds,
    fds_at_rest,
    pid_of,
    private_bytes,
    spent_s,
)
from tests.hostile.rigs.raw_clients import (
    HELLO,
    checksums_of,
    engine,
    hello_of,
    key_of,
    keys_of,
    mapped_arena,
    next_answer,
    payload_of,
    raw_engine,
    raw_socket,
    read_back,
    store,
)
from tests.rigs.daemon import SMALL, Daemon, wait_until

SPARE_FDS = 300


@pytest.fixture
def room_for() -> Iterator[Callable[[int], int]]:
    """The number of sockets that this machine's limit allows, at most those asked for; prints it if it is lower."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))

    def limit(wanted: int) -> int:
        allowed = min(wanted, before[1] - SPARE_FDS)
        if allowed < wanted:
            print(f"{allowed} connections instead of {wanted}: RLIMIT_NOFILE is {before[1]} at most")
        return allowed

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _ask_all(clients: list[socket.socket], requests: list[bytes]) -> list[list[Any]]:
    """One request on each connection, all under way at once; the answers' fields."""
    for raw, request in zip(clients, requests, strict=True):
        raw.sendall(request)
    return [next_answer(raw)[2] for raw in clients]


@pytest.mark.parametrize("wanted_connections", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_connections_work_at_once(
    start_daemon: Callable[..., Daemon], room_for: Callable[[int], int], wanted_connections: int
) -> None:
    count = room_for(wanted_connections)
    daemon = start_daemon(server__max_connections=str(count + 10), dram__capacity="32MiB")
    fds = fds_at_rest(daemon)
    clients = [raw_engine(daemon) for _ in range(count)]
    begun_s = time.perf_counter()
    with engine(daemon) as mapper, mapped_arena(mapper) as arena:
        made = _ask_all(clients, [m.encode(reserve_chain(b"", key_of(number)), 1) for number in range(count)])
        commits = []
        for number, (reservation, states, offsets, _, _) in enumerate(made):
            assert states == bytes([SaveState.RESERVED])
            payload = payload_of(key_of(number))
            at = int(np.frombuffer(offsets, "<u8")[0])
            arena[at : at + len(payload)] = payload
            commits.append(m.encode(m.Commit(reservation, checksums_of(payload), b""), 2))
        assert {bytes(fields[0]) for fields in _ask_all(clients, commits)} == {bytes([SaveState.STORED])}
        for turn in range(1, 4):
            # Everybody reads what a neighbour has stored.
            wanted = [(number * 7 + turn) % count for number in range(count)]
            leased = _ask_all(clients, [m.encode(m.Acquire(key_of(number)), turn) for number in wanted])
            assert {fields[1] for fields in leased} == {1}
            for number, fields in zip(wanted[::50], leased[::50], strict=True):
                at = int(np.frombuffer(bytes(fields[2]), "<u8")[0])
                assert arena[at : at + SMALL.chunk_bytes] == payload_of(key_of(number))
            drops = [one_way.DropLeases(columns.pack_numbers([fields[0]])) for fields in leased]
            _ask_all(clients, [m.encode(drop, 0) + m.encode(m.Renew(b""), turn) for drop in drops])
    seconds = time.perf_counter() - begun_s
    print(f"{8 * count} requests on {count} connections in {seconds:.2f} s")
    for raw in clients:
        raw.close()
    assert_nothing_is_left(daemon, fds=fds)
    assert_never_internal(daemon)


@pytest.mark.slow
def test_ten_thousand_idle_connections_cost_little(
    start_daemon: Callable[..., Daemon], room_for: Callable[[int], int]
) -> None:
    count = room_for(10_000)
    daemon = start_daemon(server__max_connections=str(count + 10))
    fds, before = fds_at_rest(daemon), private_bytes(daemon)
    with engine(daemon) as good:
        store(good, keys_of(0, 8))
        begun_s = time.perf_counter()
        idle = []
        for _ in range(count):
            raw = raw_socket(daemon)
            raw.sendall(m.encode(hello_of(role=m.ROLE_ADMIN), 0))
            idle.append(raw)
            raw.recv(4096)
        connected_s = time.perf_counter() - begun_s
        grown = private_bytes(daemon) - before
        begun_cpu_s = cpu_seconds(daemon)
        select.select([], [], [], 0.5)
        idle_cpu_s = cpu_seconds(daemon) - begun_cpu_s
        begun_s = time.perf_counter()
        assert read_back(good, keys_of(0, 8)) == [True] * 8
        served_s = time.perf_counter() - begun_s
        print(
            f"{count} idle connections in {connected_s:.2f} s, {grown / count:.0f} bytes each, "
            f"{idle_cpu_s:.2f} s of CPU in 0.5 s, a request took {served_s * 1e3:.2f} ms"
        )
        assert grown < count * (16 << 10)
        assert idle_cpu_s < 0.1
        for raw in idle:
            raw.close()
    assert_nothing_is_left(daemon, fds=fds)


def test_one_connection_too_many_is_refused_by_name(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__max_connections="5")
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(daemon.admin())
        wait_until(lambda: admin.stats()["server"]["connections"] == 1, "this one alone is open")
        good = [stack.enter_context(engine(daemon)) for _ in range(4)]
        for _ in range(20):
            assert "server.max_connections is 5" in _refusal(daemon)
        store(good[0], keys_of(0, 2))
        good.pop().close()
        wait_until(lambda: not _refusal(daemon), "a place is free again")
    wait_until(lambda: daemon.stats()["connections"] == 1, "all are gone")
    assert daemon.stats()["refused_connections"] >= 20


def _refusal(daemon: Daemon) -> str:
    """The refusal that a full daemon sends at once; empty if it accepts the client."""
    with raw_socket(daemon) as raw:
        with contextlib.suppress(BrokenPipeError):
            raw.sendall(HELLO)
        kind, _, values = next_answer(raw)
    return f"{values[0]}: {values[1]}" if kind == m.Failure.KIND else ""


def test_handshakes_under_way_count_as_connections(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__max_connections="5", server__handshake_timeout="500ms")
    wait_until(lambda: daemon.stats()["connections"] == 1, "the starter's connection has ended")
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(raw_socket(daemon))
        assert _refusal(daemon).startswith("busy: server.max_connections")
        wait_until(lambda: not _refusal(daemon), "they have run out of time")


def test_without_descriptors_no_connection_is_accepted_and_the_others_are_served(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    fds, hard = fds_at_rest(daemon), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with daemon.admin() as admin, engine(daemon) as good:
        store(good, keys_of(0, 4))
        limits = resource.prlimit(pid_of(daemon), resource.RLIMIT_NOFILE, (fds + 20, hard))
        raws = [raw_socket(daemon) for _ in range(60)]
        for raw in raws:
            raw.sendall(HELLO)
        wait_until(lambda: "accepting pauses" in daemon.log(), "the daemon says that it cannot accept")
        wait_until(lambda: spent_s(daemon) < 0.1, "it waits without spinning")
        for _ in range(20):
            assert read_back(good, keys_of(0, 4)) == [True] * 4
        assert admin.stats()["server"]["connections"] == 2 + 18
        answered, waiting = raws[:18], raws[18:]
        for raw in answered:
            raw.close()
        for raw in waiting[:10]:
            raw.recv(4096)
        assert daemon.log().count("accepting pauses") <= 3, "it does not say so again and again"
        for raw in waiting:
            raw.close()
        wait_until(lambda: admin.stats()["server"]["connections"] == 2, "all of them are gone")
        resource.prlimit(pid_of(daemon), resource.RLIMIT_NOFILE, limits)
    assert_nothing_is_left(daemon, fds=fds)
    assert_never_internal(daemon)
