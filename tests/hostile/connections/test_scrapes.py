"""Hostile HTTP clients: their cost for engines, and health requests that are answered beside them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.protocol.records import messages as m
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.hostile.rigs.raw_clients import store as store_raw
from tests.rigs.daemon import Daemon
from tests.rigs.dropping import drop_leases

LOOPS = 4
IDLE = 8
MEASURED_S = 1.0
ATTEMPTS_MAX = 3
P50_RATIO_MAX = 3.0
HEALTH_WITHIN_S = 1.0


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    """A daemon that answers over HTTP at an address and at a socket."""
    return start_daemon(
        server__metrics="127.0.0.1:0",
        server__metrics_socket=str(tmp_path / "metrics.sock"),
        server__probe_interval="0s",
    )


def _address(daemon: Daemon) -> tuple[str, int]:
    with daemon.admin() as admin:
        host, _, port = admin.info()["metrics"].rpartition(":")
    return host, int(port)


def _ask(address: tuple[str, int] | str, path: str) -> bytes:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(10.0)
        peer.connect(address)
        peer.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = b""
        while part := peer.recv(1 << 16):
            answer += part
    return answer


@contextlib.contextmanager
def _loops(address: tuple[str, int], path: str) -> Iterator[list[int]]:
    """Ask again and again, from LOOPS threads; how many answers came."""
    stop, answered = threading.Event(), [0] * LOOPS

    def run(number: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                answered[number] += _ask(address, path).startswith(b"HTTP/1.0 200")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(LOOPS)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _p50_us(daemon: Daemon) -> float:
    times = []
    with engine(daemon) as connection:
        end = time.perf_counter() + MEASURED_S
        while (begun := time.perf_counter()) < end:
            lease = connection.call(m.Acquire(keys_of(100, 16)), m.Leased).lease
            times.append(time.perf_counter() - begun)
            drop_leases(connection, lease)
    return float(np.median(times) * 1e6)


@pytest.mark.timed
@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
def test_loops_of_scrapes_do_not_slow_acquires(daemon: Daemon, path: str) -> None:
    """On a shared machine a failed measurement is repeated before it counts; all of them are printed."""
    with engine(daemon) as raw:
        store_raw(raw, keys_of(100, 16))
    alone_us = [_p50_us(daemon) for _ in range(2)]
    with _loops(_address(daemon), path) as answered:
        beside_us: list[float] = []
        while not beside_us or (min(beside_us) > P50_RATIO_MAX * min(alone_us) and len(beside_us) < ATTEMPTS_MAX):
            beside_us.append(_p50_us(daemon))
    print(f"p50 acquire {alone_us} us alone, {beside_us} us beside {LOOPS} loops with {sum(answered)} answers")
    assert sum(answered) > 0
    assert min(beside_us) < P50_RATIO_MAX * min(alone_us)


@pytest.mark.timed
def test_idle_connections_do_not_block_health_requests(daemon: Daemon, tmp_path: Path) -> None:
    address = _address(daemon)
    with contextlib.ExitStack() as stack:
        for _ in range(3 * IDLE):
            stack.enter_context(socket.create_connection(address, timeout=10.0))
        begun = time.perf_counter()
        assert _ask(address, "/healthz").startswith(b"HTTP/1.0 200")
        assert _ask(str(tmp_path / "metrics.sock"), "/readyz").startswith(b"HTTP/1.0 200")
        assert time.perf_counter() - begun < HEALTH_WITHIN_S
