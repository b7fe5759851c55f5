"""`bench rpc`: acquire of 512 chunks, against a raw unix socket's round trip of as many bytes in the same run.

The echo is a child process with blocking sockets: the least that any daemon in another process costs. Releases happen
between the samples and are not counted.
"""

import socket as sockets
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.cli.bench_lookup import LAYOUT, TOKENS, store_zeros
from kvpool.cli.bench_measure import cpu_seconds, latencies, median, timed_s

ACQUIRE_BAR_US = 100
REQUEST_BYTES = 32 + 16
ANSWER_BYTES = 512 * 17
ECHO = f"""
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
answer = bytes({ANSWER_BYTES})
while True:
    left = {REQUEST_BYTES}
    while left:
        data = peer.recv(left)
        if not data:
            sys.exit(0)
        left -= len(data)
    peer.sendall(answer)
"""


def bench_rpc(socket: str, is_quick: bool, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows: the raw round trip, and acquire with its ratio to it."""
    rounds, samples = (2, 20) if is_quick else (10, 100)
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    echo: list[float] = []
    acquire: list[float] = []
    ours, theirs = sockets.socketpair()
    command = [sys.executable, "-c", ECHO, str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: S603 - the program above
    theirs.close()
    try:
        with kv.connect(socket, model="bench-lookup", layout=LAYOUT, timeout_s=10.0) as pool:
            keys = pool.keys(tokens)
            store_zeros(pool, keys)
            before = cpu_seconds()
            for _ in range(rounds):
                echo += [timed_s(lambda: _round_trip(ours)) for _ in range(samples)]
                acquire += [_acquire_s(pool, keys) for _ in range(samples)]
                advance()
            used = cpu_seconds() - before
    finally:
        ours.close()
        child.wait(10.0)
    ratio = median(acquire) / median(echo)
    return [
        latencies("raw round trip", echo, bar_us=None, ratio=1.0, cpu_seconds=None),
        latencies(
            "acquire, 512 chunks", acquire, bar_us=ACQUIRE_BAR_US, ratio=round(ratio, 2), cpu_seconds=round(used, 3)
        ),
    ]


def _round_trip(peer: sockets.socket) -> None:
    peer.sendall(bytes(REQUEST_BYTES))
    left = ANSWER_BYTES
    while left:
        left -= len(peer.recv(left))


def _acquire_s(pool: kv.Pool, keys: kv.KeyChain) -> float:
    hit = pool.lookup(keys)
    leases: list[kv.Lease] = []
    seconds = timed_s(lambda: leases.append(pool.acquire(hit)))
    leases[0].release()
    return seconds
