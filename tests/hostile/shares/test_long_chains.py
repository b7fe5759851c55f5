"""Clients that ask about the end of the longest allowed chain as fast as they can: others get their answers in time."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.ids import KEY_BYTES
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import engine, keys_of, raw_engine
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.dropping import drop_leases

CHAIN = 16384  # server.max_chain_chunks
AT_ONCE = 8192
HOSTILE = 12
ROUNDS = 120


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    chunks = 2 * CHAIN
    return start_daemon(dram__capacity=f"{chunks * SMALL.chunk_bytes}B", dram__max_chunks=str(chunks))


def _publish(connection: BlockingConnection, keys: bytes, parent: bytes = b"") -> None:
    """Store chunks whose bytes are never read."""
    made = connection.call(reserve_chain(parent, keys), m.Reserved)
    connection.call(m.Commit(made.reservation, bytes(4 * SMALL.extents * len(made.states)), b""), m.Committed)


def _flood(raw: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BlockingIOError):
        while raw.recv(1 << 20):
            pass
    with contextlib.suppress(BlockingIOError):
        while True:
            raw.send(data)


REQUESTS: dict[str, Callable[[bytes], Any]] = {
    "reserve what is there": lambda keys: reserve_chain(keys[-2 * KEY_BYTES : -KEY_BYTES], keys[-KEY_BYTES:]),
    "lease a wrong length": lambda keys: m.Acquire(keys[-KEY_BYTES:], CHAIN - 1),
    "announce": lambda keys: m.Announce(keys),
}


@pytest.mark.timed
@pytest.mark.parametrize("name", REQUESTS)
def test_requests_about_a_long_chain_do_not_delay_others(daemon: Daemon, name: str) -> None:
    keys = keys_of(1000, CHAIN)
    with engine(daemon) as good:
        _publish(good, keys_of(0, 16))
        for first in range(0, CHAIN, AT_ONCE):
            parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else b""
            _publish(good, keys[first * KEY_BYTES : (first + AT_ONCE) * KEY_BYTES], parent)
        floods = [raw_engine(daemon) for _ in range(HOSTILE)]
        for raw in floods:
            raw.setblocking(False)
        data = m.encode(REQUESTS[name](keys), 1)
        data *= max(1, (64 << 10) // len(data))
        quiet_ms: list[float] = []
        flooded_ms: list[float] = []
        for number in range(ROUNDS + 40):
            for raw in floods if number >= 40 else ():
                _flood(raw, data)
            begun_s = time.perf_counter()
            leased = good.call(m.Acquire(keys_of(0, 16)), m.Leased)
            (flooded_ms if number >= 40 else quiet_ms).append((time.perf_counter() - begun_s) * 1e3)
            drop_leases(good, leased.lease)
        for raw in floods:
            raw.close()
    p50, p99 = np.percentile(flooded_ms, [50, 99])
    print(f"{name}: acquire {np.median(quiet_ms):.2f} ms quiet; flooded p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    assert p50 < 20.0
