"""`bench restart`: a daemon that is killed while its memory is kept: the time until all chunks are found, and hits of a replay.

Times count from the start of a launcher that becomes the daemon: to the first answered handshake, and until an engine that
was connected to the killed one finds every chunk again; CPU time of the daemon until then. An empty daemon of the same size is
started as often, in turn: the difference is the chunks'. The replay serves the same requests twice, once with kills between
them: the hits are compared. Every byte that is loaded is compared too. Main thread of a command only.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon, memory_available_bytes, start_daemon, wait_until_ready
from kvpool_tools.bench.measure import median, spread
from kvpool_tools.bench.payload import Payload
from kvpool_tools.sim.children import stop

MODEL = "bench-restart"
CHUNK_BYTES = 4096
CHAIN = 128
CHUNKS, QUICK_CHUNKS = 1 << 20, 4096
KILLS, QUICK_KILLS = 3, 1
# Two arenas of 5/4 of the chunks and their indexes.
MEMORY_FACTOR = 3
CHECKED_CHAINS = 16
READY_BAR_S = 1.0
FOUND_BAR_S = 2.0
# What the killed daemon's memory is kept for, should this process be killed too.
KEPT_FOR_S = 60
KEPT = ("server.keep_memory=keeper", f"server.keep_for={KEPT_FOR_S}s", "server.stop=demote")
POOL_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 30.0
POLL_S = 0.001
POISON = 0xA5

REPLAY_KILLS = 10
REQUESTS, QUICK_REQUESTS = 4000, 200
PROMPTS = 600
PROMPT_CHUNKS_MAX = 32
REPLAY_CHUNK_BYTES = 32 << 10
# DRAM has room for so much of what the replay's prompts have: all of it, or a part, for which chunks are evicted.
REPLAYS = {
    "room for all": (1.25, "class-queues"),
    "room for a quarter": (0.25, "class-queues"),
    "room for a quarter, lru": (0.25, "lru"),
}
ZIPF = 1.1
SEED = 7

Row = dict[str, Any]
Advance = Callable[[int], None]


def bench_restart(is_quick: bool, advance: Advance) -> list[Row]:
    """One row: starts over many small chunks."""
    chunks, kills = (QUICK_CHUNKS, QUICK_KILLS) if is_quick else (_chunks(), KILLS)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        return [_bench_start(Path(folder), chunks, kills, lambda: advance(1 + kills))]


def bench_killed_replay(is_quick: bool, advance: Advance) -> list[Row]:
    """A row for each room and policy: a replay with kills and without."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        for name in REPLAYS:
            rows.append(_bench_replay(Path(folder), name, QUICK_REQUESTS if is_quick else REQUESTS))
            advance(len(REPLAYS))
    return rows


def _chunks() -> int:
    """A million, or what the machine can spare: the kept arena, and an empty one beside it."""
    chunks = CHUNKS
    while chunks > QUICK_CHUNKS and MEMORY_FACTOR * chunks * CHUNK_BYTES > memory_available_bytes():
        chunks //= 2
    return chunks


class KeptDaemon:
    """One daemon after another at one socket, each over the memory of the one before where it is kept. A context: at its end it
    is kept no more."""

    def __init__(self, directory: Path, capacity: int, *options: str) -> None:
        directory.mkdir()
        self.socket = str(directory / "kvpool.sock")
        self._capacity = capacity
        self._options = options
        self._start()

    def __enter__(self) -> "KeptDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)

    @property
    def measured(self) -> MeasuredDaemon:
        """The one that serves now."""
        return MeasuredDaemon(self.socket, self._process.pid, self._capacity, is_own=True)

    def restart(self) -> float:
        """Kill it, and start another one, which answers; when its start began."""
        self._process.kill()
        self._process.wait()
        return self._start()

    def _start(self) -> float:
        began = time.perf_counter()
        self._process = start_daemon(self.socket, self._capacity, *self._options)
        wait_until_ready(self.socket, self._process)
        return began


def _bench_start(folder: Path, chunks: int, kills: int, advance: Callable[[], None]) -> Row:
    capacity = chunks * CHUNK_BYTES * 5 // 4
    options = (f"dram.max_chunks={chunks * 5 // 4}",)
    ready_s, found_s, cpu_s, empty_s, empty_cpu_s = [], [], [], [], []
    with KeptDaemon(folder / "full", capacity, *options, *KEPT) as daemon, _pool(daemon.socket, CHUNK_BYTES) as pool:
        chains = [_chain(pool, number, CHAIN) for number in range(chunks // CHAIN)]
        for keys in chains:
            if _save(pool, keys) != CHAIN:
                raise KVPoolError(f"the daemon declined a save of {CHAIN} small chunks")
        advance()
        for number in range(kills):
            with KeptDaemon(folder / f"empty-{number}", capacity, *options, "server.keep_memory=off") as empty:
                began = empty.restart()
                empty_s.append(time.perf_counter() - began)
                empty_cpu_s.append(empty.measured.cpu_seconds())
            began = daemon.restart()
            ready_s.append(time.perf_counter() - began)
            _wait_found(pool, chains)
            found_s.append(time.perf_counter() - began)
            cpu_s.append(daemon.measured.cpu_seconds())
            advance()
        loaded = [_load(pool, keys) for keys in chains[:: max(1, len(chains) // CHECKED_CHAINS)]]
        if any(chunks < CHAIN for chunks, _ in loaded):
            raise KVPoolError("chunks that are found could not be loaded")
    return {
        "name": f"{chunks} chunks in DRAM, daemon killed",
        "starts": kills,
        "ready_s": round(median(ready_s), 3),
        "ready_spread_s": spread(ready_s, 3),
        "ready_bar_s": READY_BAR_S,
        "found_s": round(median(found_s), 3),
        "found_spread_s": spread(found_s, 3),
        "found_bar_s": FOUND_BAR_S,
        "ready_empty_s": round(median(empty_s), 3),
        "cpu_seconds": round(median(cpu_s), 3),
        "empty_cpu_seconds": round(median(empty_cpu_s), 3),
        "wrong_bytes": sum(wrong for _, wrong in loaded),
    }


def _bench_replay(folder: Path, name: str, requests: int) -> Row:
    """Requests of prompts, some of them often; the same ones without a kill and with kills between them."""
    random = np.random.default_rng(SEED)
    lengths = random.integers(1, PROMPT_CHUNKS_MAX + 1, PROMPTS)
    shares = 1.0 / np.arange(1, PROMPTS + 1) ** ZIPF
    asked = random.choice(PROMPTS, requests, p=shares / shares.sum())
    room, policy = REPLAYS[name]
    capacity = int(room * lengths.sum() * REPLAY_CHUNK_BYTES)
    options = (f"dram.policy={policy}", *KEPT)
    hits, chunks, wrong_bytes = {}, int(lengths[asked].sum()), 0
    for kills in (0, REPLAY_KILLS):
        at_socket = folder / f"{policy}-{capacity}-{kills}"
        with KeptDaemon(at_socket, capacity, *options) as daemon, _pool(daemon.socket, REPLAY_CHUNK_BYTES) as pool:
            at = {requests * kill // (kills + 1) for kill in range(1, kills + 1)}
            hits[kills] = 0
            for number, prompt in enumerate(asked):
                if number in at:
                    daemon.restart()
                    _wait_connected(pool, daemon)
                keys = _chain(pool, int(prompt), int(lengths[prompt]))
                loaded, wrong = _load(pool, keys)
                hits[kills] += loaded
                wrong_bytes += wrong
                _save(pool, keys, loaded)
    return {
        "name": f"replay, {name}",
        "requests": requests,
        "kills": REPLAY_KILLS,
        "hit_rate": round(hits[REPLAY_KILLS] / chunks, 4),
        "hit_rate_unkilled": round(hits[0] / chunks, 4),
        "hit_ratio": round(hits[REPLAY_KILLS] / hits[0], 4),
        "wrong_bytes": wrong_bytes,
    }


def _pool(socket: str, chunk_bytes: int) -> kv.Pool:
    """A Pool that is connected. `timeout_s` bounds what a daemon takes that has just begun."""
    layout = kv.Layout(layers=1, kv_heads=1, head_dim=chunk_bytes // 64, dtype="bfloat16", chunk_tokens=16)
    assert layout.chunk_bytes == chunk_bytes
    pool = kv.connect(socket, model=MODEL, revision=REVISION, layout=layout, timeout_s=POOL_TIMEOUT_S)
    _wait(lambda: pool.connected, "a client is not connected")
    return pool


def _chain(pool: kv.Pool, number: int, chunks: int) -> kv.KeyChain:
    tokens = np.random.default_rng(number).integers(0, 50_000, chunks * pool.layout.chunk_tokens, dtype=np.int32)
    return pool.keys(tokens)


def _save(pool: kv.Pool, keys: kv.KeyChain, first: int = 0) -> int:
    """Save chunks from the `first` one on; how many are stored then."""
    if first == len(keys):
        return 0
    rows = np.empty((len(keys) - first, pool.layout.chunk_bytes), np.uint8)
    Payload(pool.layout).fill(rows, keys, first)
    return pool.save(keys, from_=rows, first_chunk=first).commit().stored


def _load(pool: kv.Pool, keys: kv.KeyChain) -> tuple[int, int]:
    """Load what there is of a chain; chunks, and wrong bytes in them."""
    with pool.acquire(pool.lookup(keys)) as lease:
        rows = np.full((lease.chunks, pool.layout.chunk_bytes), POISON, np.uint8)
        chunks = pool.load(lease, into=rows).wait().chunks
    if not chunks:
        return 0, 0
    return chunks, sum(each.wrong_bytes for each in Payload(pool.layout).check(rows[:chunks], keys, 0))


def _wait_found(pool: kv.Pool, chains: Sequence[kv.KeyChain]) -> None:
    """Wait until each chunk of these chains is found."""
    _wait(lambda: pool.connected, "the client is not connected again")
    _wait(lambda: all(pool.lookup(keys).chunks == len(keys) for keys in chains), "not every chunk is found again")


def _wait_connected(pool: kv.Pool, daemon: KeptDaemon) -> None:
    """Wait until it is connected to the daemon that serves now."""
    epoch = daemon.measured.info()["epoch"]
    _wait(lambda: pool.epoch.hex() == epoch, "the client is not connected again")


def _wait(condition: Callable[[], bool], what_not: str) -> None:
    deadline = Deadline(WAIT_TIMEOUT_S)
    while not condition():
        if deadline.has_passed():
            raise KVPoolError(f"{what_not} after {WAIT_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
