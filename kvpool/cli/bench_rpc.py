"""`bench rpc`: acquire of 512 chunks, against a raw unix socket's round trip of as many bytes in the same run.

The echo is a child process with blocking sockets: the least that a daemon on another core costs. While it is measured the
two ends are kept on cores of their own, where there are two: left alone they settle now on one core, now on two, which
halves or doubles the floor from run to run (9 and 19 us, measured). The daemon is left where the kernel puts it. The two
are taken in turn, in rounds, of which the first is not counted. Lookups and releases happen between the samples and are
not timed; the CPU seconds include them.
"""

import os
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import kvpool_client as kv
from kvpool.cli.bench_daemon import MeasuredDaemon
from kvpool.cli.bench_lookup import MODEL, TOKENS, connect, store_zeros
from kvpool.cli.bench_measure import cpu_seconds, latencies, median, timed_s
from kvpool.errors import KVPoolError

ACQUIRE_BAR_US = 100
REQUEST_BYTES = 32 + 16
ANSWER_BYTES = 512 * 17
TIMEOUT_S = 10.0
ROUNDS, SAMPLES = 11, 100
QUICK_ROUNDS, QUICK_SAMPLES = 3, 20
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


def bench_rpc(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the raw round trip, and acquire with its ratio to it."""
    rounds, samples = (QUICK_ROUNDS, QUICK_SAMPLES) if is_quick else (ROUNDS, SAMPLES)
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    seconds: dict[str, list[float]] = {"echo": [], "acquire": []}
    cpu_s = {"echo": 0.0, "acquire": 0.0, "daemon": 0.0}
    ours, theirs = sockets.socketpair()
    ours.settimeout(TIMEOUT_S)
    command = [sys.executable, "-I", "-S", "-c", ECHO, str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: S603 - the program above; it ends with its peer
    theirs.close()
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(child.pid, {max(cores)})
    try:
        with connect(daemon) as pool:
            keys = pool.keys(tokens)
            store_zeros(pool, keys)
            for number in range(rounds):
                before = _cpu(daemon, child.pid)
                os.sched_setaffinity(0, {min(cores)})
                echo = [timed_s(lambda: _round_trip(ours)) for _ in range(samples)]
                os.sched_setaffinity(0, cores)
                between = _cpu(daemon, child.pid)
                acquire = [_acquire_s(pool, keys) for _ in range(samples)]
                after = _cpu(daemon, child.pid)
                if number:
                    seconds["echo"] += echo
                    seconds["acquire"] += acquire
                    cpu_s["echo"] += between[0] - before[0] + between[2] - before[2]
                    cpu_s["acquire"] += after[0] - between[0]
                    cpu_s["daemon"] += after[1] - between[1]
                advance(rounds)
    finally:
        os.sched_setaffinity(0, cores)
        ours.close()
        _end(child)
    if not daemon.is_own:
        daemon.forget(MODEL)
    ratio = round(median(seconds["acquire"]) / median(seconds["echo"]), 2)
    used, theirs_s = round(cpu_s["acquire"], 4), round(cpu_s["daemon"], 4)
    echo_s = round(cpu_s["echo"], 4)
    return [
        latencies(
            "raw round trip", seconds["echo"], bar_us=None, ratio=1.0, cpu_seconds=echo_s, daemon_cpu_seconds=None
        ),
        latencies(
            "acquire, 512 chunks",
            seconds["acquire"],
            bar_us=ACQUIRE_BAR_US,
            ratio=ratio,
            cpu_seconds=used,
            daemon_cpu_seconds=theirs_s,
        ),
    ]


def _cpu(daemon: MeasuredDaemon, echo_pid: int) -> tuple[float, float, float]:
    """CPU seconds so far of this process, the daemon, and the echo."""
    return time.process_time(), daemon.cpu_seconds(), cpu_seconds(echo_pid)


def _end(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _round_trip(peer: sockets.socket) -> None:
    peer.sendall(bytes(REQUEST_BYTES))
    left = ANSWER_BYTES
    while left:
        data = peer.recv(left)
        if not data:
            raise KVPoolError("the echo process has ended")
        left -= len(data)


def _acquire_s(pool: kv.Pool, keys: kv.KeyChain) -> float:
    hit = pool.lookup(keys)
    leases: list[kv.Lease] = []
    seconds = timed_s(lambda: leases.append(pool.acquire(hit)))
    if leases[0].chunks != len(keys):
        raise KVPoolError(f"acquire leased {leases[0].chunks} of {len(keys)} chunks: the measured call proves nothing")
    leases[0].release()
    return seconds
