"""`bench rpc`: acquire and release of 512 chunks, and hits of 8192 tokens (keys, lookup, acquire, release) of a plain layout,
of a hybrid one with four groups and of a tensor-parallel rank's share, against a raw unix socket's round trip of as many bytes
as the acquire's in the same run (see `echo.py`); a set of 64 chunks of 64 KiB, saved, leased and loaded, against memcpy of its
rows; and saves and commits, unless the daemon is a shared one.

All are taken in turn, in rounds. The daemon is not pinned to a core. Behind each acquire the lookup, the release and a request
that waits for it are not timed; its CPU times have them. In the other rows a release falls into the next sample, which is how
it delays an engine; their CPU times are those of the requests that the row names.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
import kvpool_native
from kvpool.errors import KVPoolError
from kvpool_tools.bench.commit import bench_commit
from kvpool_tools.bench.daemon import MeasuredDaemon
from kvpool_tools.bench.echo import RawEcho
from kvpool_tools.bench.lookup import LAYOUT, MODEL, TOKENS, connect, store_zeros
from kvpool_tools.bench.measure import Bars, Rounds, timed_s

ECHO, ACQUIRE, BOTH = "raw round trip", "acquire, 512 chunks", "acquire and release, 512 chunks"
HIT, GROUPS_HIT, SHARE_HIT = "hit of 8192 tokens", "the same, 4 groups", "the same, a share of 2"
SET_FLOOR = "memcpy, 64 rows of 64 KiB"
SET_SAVE, SET_LEASE, SET_LOAD = "set of 64 rows, save", "the same, lease and release", "the same, load"
# The floor of each row, and its bars: 0.3 to 0.6 of what earlier builds had on two cores of a Xeon.
ROWS: dict[str, tuple[str, Bars]] = {
    ECHO: (ECHO, Bars()),
    ACQUIRE: (ECHO, Bars(us=100, times_floor=1.15)),
    BOTH: (ECHO, Bars(daemon_cpu_us=21)),
    HIT: (ECHO, Bars(us=60, times_floor=1.44)),
    GROUPS_HIT: (HIT, Bars(times_floor=1.3)),
    SHARE_HIT: (HIT, Bars(times_floor=1.3)),
    SET_FLOOR: (SET_FLOOR, Bars()),
    SET_SAVE: (SET_FLOOR, Bars()),
    SET_LEASE: (ECHO, Bars(us=800)),
    SET_LOAD: (SET_FLOOR, Bars()),
}
NO_TICKET = bytes(32)
SET_KEYS = 64
SET_LAYOUT = kv.Layout(layers=1, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=16)
HIT_TOKENS = 8192
REQUEST_BYTES = 32 + 16
ANSWER_BYTES = 512 * 17
ROUNDS, SAMPLES = 11, 100
QUICK_ROUNDS, QUICK_SAMPLES = 3, 20
# A quarter of the layers attends to everything, the others to windows, as large as hybrid models have them.
GROUPS = kv.Layout(
    chunk_tokens=LAYOUT.chunk_tokens,
    groups=(
        kv.Group(layers=1, kv_heads=1, head_dim=16, dtype="bfloat16"),
        *(
            kv.Group(kind="window", window=window, layers=1, kv_heads=1, head_dim=16, dtype="bfloat16")
            for window in (512, 1024, 4096)
        ),
    ),
)
SHARED = kv.Layout(layers=1, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=LAYOUT.chunk_tokens, head_groups=2)


def bench_rpc(daemon: MeasuredDaemon, is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """A row for each of ROWS, and those of `bench_commit`."""
    rounds, samples = (QUICK_ROUNDS, QUICK_SAMPLES) if is_quick else (ROUNDS, SAMPLES)
    tokens = np.random.default_rng(2).integers(0, 50_000, TOKENS, dtype=np.int32)
    some = tokens[:HIT_TOKENS]
    with ExitStack() as stack:
        raw = stack.enter_context(RawEcho(REQUEST_BYTES, ANSWER_BYTES))
        pool = stack.enter_context(connect(daemon))
        keys = pool.keys(tokens)
        store_zeros(pool, keys)
        hits = {
            HIT: pool,
            GROUPS_HIT: _stored(stack, daemon, GROUPS, some),
            SHARE_HIT: _stored(
                stack, daemon, SHARED, some, shares=[kv.Share.of_rank(SHARED, rank, 2) for rank in (0, 1)]
            ),
        }
        calls: dict[str, Callable[[], list[float]]] = {
            ACQUIRE: lambda: [_acquire_s(pool, keys) for _ in range(samples)],
            BOTH: lambda: _lease_s(pool, keys, samples),
        } | {
            name: (lambda engine=engine: [timed_s(partial(_hit, engine, some)) for _ in range(samples)])
            for name, engine in hits.items()
        }
        calls |= _set_calls(stack.enter_context(connect(daemon, SET_LAYOUT)), samples)
        taken = Rounds(rounds, advance)
        taken.run(
            {ECHO: (lambda: raw.round_trips_s(samples), raw.cpu_seconds)}
            | {name: (call, daemon.cpu_seconds) for name, call in calls.items()}
        )
    if not daemon.is_own:
        daemon.forget(MODEL)
    rows = [taken.row(name, floor, bars) for name, (floor, bars) in ROWS.items()]
    return rows + (bench_commit(is_quick, advance) if daemon.is_own else [])


def _stored(
    stack: ExitStack,
    daemon: MeasuredDaemon,
    layout: kv.Layout,
    tokens: npt.NDArray[np.int32],
    *,
    shares: Sequence[kv.Share | None] = (None,),
) -> kv.Pool:
    """A Pool of the first share, with the prompt stored by all of them."""
    salt = os.urandom(16)
    pools = [stack.enter_context(connect(daemon, layout, share, salt)) for share in shares]
    for pool in pools:
        store_zeros(pool, pool.keys(tokens))
    return pools[0]


def _set_calls(pool: kv.Pool, samples: int) -> dict[str, Callable[[], list[float]]]:
    """What is measured of a set: each sample saves new keys, the others lease and load what the last save has stored."""
    chance = np.random.default_rng(4)
    rows = chance.integers(0, 256, (SET_KEYS, SET_LAYOUT.chunk_bytes), dtype=np.uint8)
    into = np.zeros_like(rows)
    names = chance.integers(0, 256, (SET_KEYS, 32), dtype=np.uint8)

    def save() -> None:
        if pool.save_set(names, rows).commit().stored != SET_KEYS:
            raise KVPoolError("a set was declined: the measured call proves nothing")

    def save_anew() -> float:
        names[:] = chance.integers(0, 256, names.shape, dtype=np.uint8)
        return timed_s(save)

    def lease() -> None:
        with pool.acquire_set(names) as leased:
            if leased.chunks != SET_KEYS:
                raise KVPoolError(f"{leased.chunks} of {SET_KEYS} keys were leased: the measured call proves nothing")

    def load_s() -> float:
        with pool.acquire_set(names) as leased:
            into.fill(0)
            seconds = timed_s(lambda: pool.load_set(leased, into).wait())
        if not np.array_equal(into, rows):
            raise KVPoolError("wrong bytes: a set came back other than it was saved")
        return seconds

    few = max(1, samples // 10)
    flat, copy = rows.reshape(-1), np.zeros(rows.size, np.uint8)
    return {
        SET_FLOOR: lambda: [timed_s(lambda: kvpool_native.copy_plain(copy, flat)) for _ in range(few)],
        SET_SAVE: lambda: [save_anew() for _ in range(few)],
        SET_LEASE: lambda: [timed_s(lease) for _ in range(samples)],
        SET_LOAD: lambda: [load_s() for _ in range(few)],
    }


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


def _lease_s(pool: kv.Pool, keys: kv.KeyChain, samples: int) -> list[float]:
    """Seconds of so many leases that follow each other, each released at once, and all of them at the end."""
    hit = pool.lookup(keys)
    seconds = [timed_s(lambda: pool.acquire(hit).release()) for _ in range(samples)]
    pool.claim(NO_TICKET)
    return seconds
