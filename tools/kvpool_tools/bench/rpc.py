"""`bench rpc`: acquire of 512 chunks, and a hit of 8192 tokens (keys, lookup, acquire, release), against a raw unix socket's
round trip of as many bytes as the acquire's in the same run (see `echo.py`); and commits, unless the daemon is a shared one.

The three are taken in turn, in rounds, of which the first is not counted. The daemon is not pinned to a core. Lookups and
releases of the 512 chunks happen between the samples and are not timed; the CPU seconds include them. A release is not
answered: behind one of 512 chunks another request waits for it, untimed; of the hit's it falls into the next sample.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool_tools.bench.commit import bench_commit
from kvpool_tools.bench.daemon import MeasuredDaemon
from kvpool_tools.bench.echo import RawEcho
from kvpool_tools.bench.lookup import MODEL, TOKENS, connect, store_zeros
from kvpool_tools.bench.measure import latencies, median, timed_s

ACQUIRE_BAR_US = 100
NO_TICKET = bytes(32)
HIT_TOKENS = 8192
HIT_BAR_US = 60
REQUEST_BYTES = 32 + 16
ANSWER_BYTES = 512 * 17
ROUNDS, SAMPLES = 11, 100
QUICK_ROUNDS, QUICK_SAMPLES = 3, 20


def bench_rpc(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the raw round trip, and acquire and a whole hit with their ratios to it."""
    rounds, samples = (QUICK_ROUNDS, QUICK_SAMPLES) if is_quick else (ROUNDS, SAMPLES)
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    seconds: dict[str, list[float]] = {"echo": [], "acquire": [], "hit": []}
    cpu_s = dict.fromkeys(("echo", "acquire", "daemon", "hit", "hit daemon"), 0.0)
    with RawEcho(REQUEST_BYTES, ANSWER_BYTES) as raw, connect(daemon) as pool:
        keys = pool.keys(tokens)
        store_zeros(pool, keys)
        for number in range(rounds):
            before = _cpu(daemon, raw)
            echo = raw.round_trips_s(samples)
            between = _cpu(daemon, raw)
            acquire = [_acquire_s(pool, keys) for _ in range(samples)]
            after = _cpu(daemon, raw)
            hits = [timed_s(lambda: _hit(pool, tokens[:HIT_TOKENS])) for _ in range(samples)]
            last = _cpu(daemon, raw)
            if number:
                seconds["echo"] += echo
                seconds["acquire"] += acquire
                cpu_s["echo"] += between[0] - before[0] + between[2] - before[2]
                cpu_s["acquire"] += after[0] - between[0]
                cpu_s["daemon"] += after[1] - between[1]
                seconds["hit"] += hits
                cpu_s["hit"] += last[0] - after[0]
                cpu_s["hit daemon"] += last[1] - after[1]
            advance(rounds)
    if not daemon.is_own:
        daemon.forget(MODEL)
    return [
        _row("raw round trip", seconds["echo"], echo_s=seconds["echo"], used_s=cpu_s["echo"]),
        _row(
            "acquire, 512 chunks",
            seconds["acquire"],
            echo_s=seconds["echo"],
            bar_us=ACQUIRE_BAR_US,
            used_s=cpu_s["acquire"],
            daemon_s=cpu_s["daemon"],
        ),
        _row(
            "hit of 8192 tokens",
            seconds["hit"],
            echo_s=seconds["echo"],
            bar_us=HIT_BAR_US,
            used_s=cpu_s["hit"],
            daemon_s=cpu_s["hit daemon"],
        ),
        *(bench_commit(is_quick) if daemon.is_own else []),
    ]


def _row(
    name: str,
    taken_s: list[float],
    *,
    echo_s: list[float],
    used_s: float,
    bar_us: int | None = None,
    daemon_s: float | None = None,
) -> dict[str, object]:
    return latencies(
        name,
        taken_s,
        bar_us=bar_us,
        ratio=round(median(taken_s) / median(echo_s), 2),
        cpu_seconds=round(used_s, 4),
        daemon_cpu_seconds=None if daemon_s is None else round(daemon_s, 4),
    )


def _cpu(daemon: MeasuredDaemon, raw: RawEcho) -> tuple[float, float, float]:
    """CPU seconds so far of this process, the daemon, and the echo."""
    return time.process_time(), daemon.cpu_seconds(), raw.cpu_seconds()


def _hit(pool: kv.Pool, tokens: npt.NDArray[np.int32]) -> None:
    """An engine's calls for a prompt that is a hit, without the copy."""
    hit = pool.lookup(pool.keys(tokens))
    lease = pool.acquire(hit)
    lease.release()
    if lease.tokens != len(tokens):
        raise KVPoolError(f"the hit has {lease.tokens} of {len(tokens)} tokens: the measured call proves nothing")


def _acquire_s(pool: kv.Pool, keys: kv.KeyChain) -> float:
    hit = pool.lookup(keys)
    leases: list[kv.Lease] = []
    seconds = timed_s(lambda: leases.append(pool.acquire(hit)))
    if leases[0].chunks != len(keys):
        raise KVPoolError(f"acquire leased {leases[0].chunks} of {len(keys)} chunks: the measured call proves nothing")
    leases[0].release()
    pool.claim(NO_TICKET)  # answered when the release has been served
    return seconds
