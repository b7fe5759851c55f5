"""Client process of `bench replay`: `python -m kvpool_tools.bench.replay.client SETTINGS`.

Plays an engine. Reads one request a line on stdin, `[hash id, …]`, and does with it what an engine does: keys → lookup →
acquire → load of what is there → save of the rest. Before a load its target is overwritten, so that old bytes cannot
pass for new ones; after it every byte that the load reports as good is compared with the payload of the chunk's key. Prints one
JSON object a line on stdout: that it is ready, the result of each request with the times of its parts, and at the end of stdin
the usage of the process. Making and comparing payload is never inside a measured time.

It ends with its stdin, with its stdout, or with its parent. One thread, beside those of the Pool; every wait has the
Pool's deadline.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool.clock import NS_PER_S, Deadline, MonotonicClock
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.protocol.blocking import BlockingConnection
from kvpool.states import Level
from kvpool_tools.bench.daemon import REVISION
from kvpool_tools.bench.measure import timed_s
from kvpool_tools.bench.payload import Payload

MODEL = "bench-replay"
LAYERS = 4
PLANES = 2
POOL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
CONNECT_POLL_S = 0.005
SETTLE_TIMEOUT_S = 30.0
SETTLE_POLL_S = 0.0005
UNDER_WAY = ("ssd.demotions_under_way", "ssd.promotions_under_way")
POISON = 0xA5
FLOOR_EVERY = 8
FLOOR_BYTES = 64 << 20
WRONG_NAMED_MAX = 16
READY: dict[str, object] = {"ready": True}


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of every client of a replay. `salt` keeps the keys of one replay apart from those of another.

    `is_settled`: before each request, and before its save, the client waits until nothing moves between the daemon's tiers.
    """

    socket: str
    salt: str
    chunk_bytes: int
    block_tokens: int
    chunks_max: int
    is_settled: bool = False


@dataclass(slots=True)
class RequestResult:
    """Result of one request. Times in seconds; 0 where a part was not needed. `began_s`: by the monotonic clock.

    `loaded_ssd_chunks` of the loaded ones were not in DRAM when they were leased.
    """

    chunks: int = 0
    began_s: float = 0.0
    hit_chunks: int = 0
    leased_chunks: int = 0
    loaded_chunks: int = 0
    loaded_ssd_chunks: int = 0
    load_reason: str = ""
    stored_chunks: int = 0
    present_chunks: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    acquire_s: float = 0.0
    load_s: float = 0.0
    save_s: float = 0.0
    memcpy_s: float = 0.0
    memcpy_bytes: int = 0
    wrong_bytes: int = 0
    wrong_keys: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Usage of a client process for its requests: CPU seconds of the whole process, and of the threads that copy."""

    cpu_seconds: float
    copy_cpu_seconds: float


def replay_layout(chunk_bytes: int, block_tokens: int) -> kv.Layout:
    """A layout whose chunks are a trace's blocks, scaled to `chunk_bytes`. Raises InvalidArgument where they cannot be."""
    unit = LAYERS * PLANES * block_tokens
    if chunk_bytes < unit or chunk_bytes % unit:
        raise InvalidArgument(f"chunk size is {chunk_bytes} bytes, expected a multiple of {unit}")
    head_dim = chunk_bytes // unit
    return kv.Layout(
        layers=LAYERS, planes=PLANES, kv_heads=1, head_dim=head_dim, dtype="uint8", chunk_tokens=block_tokens
    )


class IdleWait:
    """Idle wait: waits until a daemon moves nothing between its tiers, through a connection of its own."""

    def __init__(self, socket: str) -> None:
        self._connection = BlockingConnection.admin(socket, POOL_TIMEOUT_S)

    def wait(self) -> None:
        """Return when nothing moves. Raises KVPoolError when that takes longer than SETTLE_TIMEOUT_S."""
        deadline = Deadline(SETTLE_TIMEOUT_S)
        while any(self._connection.stats().get("ssd", {}).get(name, 0) for name in UNDER_WAY):
            if deadline.has_passed():
                raise KVPoolError(f"chunks are still moving between the tiers after {SETTLE_TIMEOUT_S:.0f} s")
            time.sleep(SETTLE_POLL_S)


class Replayer:
    """Serves requests of a trace through one Pool.

    Invariant: only this object uses `_rows`, and only within `serve`.
    """

    def __init__(self, pool: kv.Pool, chunks_max: int, settle: Callable[[], None]) -> None:
        """`settle` is called before a request and before its save."""
        self._pool = pool
        self._settle = settle
        self._clock = MonotonicClock()
        self._payload = Payload(pool.layout)
        self._rows = np.zeros((max(chunks_max, 1), pool.layout.chunk_bytes), np.uint8)
        self._floor_source = np.ones(max(FLOOR_BYTES, pool.layout.chunk_bytes), np.uint8)
        self._floor_at = 0
        self._loads = 0

    def serve(self, hash_ids: list[int]) -> RequestResult:
        """Look up, lease, load and verify the hit, save the rest."""
        hashes = [kvpool_native.blake3(value.to_bytes(8, "little")) for value in hash_ids]
        keys = self._pool.keys_from_hashes(hashes, self._pool.layout.chunk_tokens)
        self._settle()
        served = RequestResult(chunks=len(keys), began_s=self._clock.now_ns() / NS_PER_S)
        if len(keys):
            self._load(keys, served)
            if served.loaded_chunks < len(keys):
                self._settle()
                self._save(keys, served)
        return served

    def _load(self, keys: kv.KeyChain, served: RequestResult) -> None:
        start = time.perf_counter()
        hit = self._pool.lookup(keys)
        lease = self._pool.acquire(hit)
        served.acquire_s = time.perf_counter() - start
        served.hit_chunks, served.leased_chunks = hit.chunks, lease.chunks
        tiers = lease.tiers
        with lease:
            if not lease.chunks:
                return
            rows = self._rows[: lease.chunks]
            rows.fill(POISON)
            start = time.perf_counter()
            result = self._pool.load(lease, into=rows).wait()
            served.load_s = time.perf_counter() - start
        served.loaded_chunks, served.load_reason = result.chunks, result.reason
        served.loaded_ssd_chunks = int(np.count_nonzero(tiers[: result.chunks] == Level.SSD))
        for wrong in self._payload.check(rows[: result.chunks], keys, 0):
            served.wrong_bytes += wrong.wrong_bytes
            if len(served.wrong_keys) < WRONG_NAMED_MAX:
                served.wrong_keys.append(f"{wrong.key.hex()} layer {wrong.layer}")
        self._loads += 1
        if self._loads % FLOOR_EVERY == 0 and result.chunks:
            self._measure_floor(result.chunks * self._pool.layout.chunk_bytes, served)

    def _measure_floor(self, size: int, served: RequestResult) -> None:
        """memcpy of as many bytes as were loaded, from memory that is as cold as the arena."""
        size = min(size, len(self._floor_source))
        if self._floor_at + size > len(self._floor_source):
            self._floor_at = 0
        source = self._floor_source[self._floor_at : self._floor_at + size]
        target = self._rows.reshape(-1)[:size]
        served.memcpy_s = timed_s(lambda: kvpool_native.copy_plain(target, source))
        served.memcpy_bytes = size
        self._floor_at += size

    def _save(self, keys: kv.KeyChain, served: RequestResult) -> None:
        first = served.loaded_chunks
        rows = self._rows[: len(keys) - first]
        self._payload.fill(rows, keys, first)
        start = time.perf_counter()
        result = self._pool.save(keys, from_=rows, first_chunk=first).commit()
        served.save_s = time.perf_counter() - start
        assert result is not None
        served.stored_chunks, served.present_chunks = result.stored, result.present
        served.declined = dict(result.reasons)


def main() -> None:
    """Serve the requests that come over stdin, until it ends."""
    settings = ReplaySettings(**json.loads(sys.argv[1]))
    layout = replay_layout(settings.chunk_bytes, settings.block_tokens)
    salt = settings.salt.encode()
    with kv.connect(
        settings.socket, model=MODEL, revision=REVISION, layout=layout, salt=salt, timeout_s=POOL_TIMEOUT_S
    ) as pool:
        _wait_connected(pool)
        settle = IdleWait(settings.socket).wait if settings.is_settled else _do_nothing
        replayer = Replayer(pool, settings.chunks_max, settle)
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, and nobody reads the output
            cpu_before_s = time.process_time()
            _say(READY)
            for line in sys.stdin.buffer:
                _say(asdict(replayer.serve(json.loads(line))))
            copied = float(pool.stats()["copy_cpu_seconds"])
            _say(asdict(ProcessUsage(time.process_time() - cpu_before_s, copied)))
            return
    # Nobody reads: prevent another write when the interpreter closes its files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wait_connected(pool: kv.Pool) -> None:
    deadline = Deadline(CONNECT_TIMEOUT_S)
    while not pool.connected:
        if deadline.has_passed():
            raise SystemExit(f"no daemon answered within {CONNECT_TIMEOUT_S:.0f} s: {pool.stats()['last_error']}")
        time.sleep(CONNECT_POLL_S)


def _do_nothing() -> None:
    """Requests follow each other at once."""


def _say(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
