"""`bench ssd`, reopening: the time until a daemon serves, and its tier, with chunks that a killed one left on disk.

Times count from the start of a launcher that becomes the daemon: to the first answered handshake (socket and DRAM), and to
the tier's state `ok` (everything restored). A daemon over an empty tier of the same size is started as often, in turn: the
difference is the chunks'. The catalogue is in the page cache, as it is after a crash of the daemon alone. At the end some
of the chunks are loaded and compared. Main thread of a command only.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon, start_daemon, wait_until_open, wait_until_ready
from kvpool_tools.bench.disk import FOLDER_PREFIX
from kvpool_tools.bench.measure import median, spread
from kvpool_tools.bench.payload import Payload
from kvpool_tools.bench.ssd.end_to_end import MODEL, POOL_TIMEOUT_S, ssd_layout
from kvpool_tools.bench.ssd.rig import POISON

CHUNK_BYTES = 4096
SLOT_BYTES = 8192
CHAIN = 128
CHUNKS, QUICK_CHUNKS = 64 << 10, 1024
STARTS, QUICK_STARTS = 3, 1
CHECKED_CHAINS = 4
SEGMENTS_SPARE = 2
CATALOGUE_BYTES_PER_CHUNK = 640
READY_BAR_S = 1.0
# For each million of chunks.
OPEN_BAR_S = 2.0
DRAM_BYTES_MIN = 64 << 20
DEMOTE_ALL_TIMEOUT_S = 300.0

Row = dict[str, Any]


def bench_reopen(folder: Path, is_quick: bool, advance: Callable[[int], None]) -> list[Row]:
    """One row: a tier with many small chunks, after a kill."""
    chunks, starts = (QUICK_CHUNKS, QUICK_STARTS) if is_quick else (CHUNKS, STARTS)
    steps = 2 + starts
    salt = os.urandom(16)
    full, empty = _Tier(folder / "full", chunks), _Tier(folder / "empty", chunks)
    with full.started() as (daemon, _):
        wait_until_open(daemon)
        _fill(daemon, chunks, salt)
        advance(steps)
    with empty.started() as (daemon, _):
        wait_until_open(daemon)
    ready_s, open_s, empty_s = [], [], []
    restored, wrong_bytes = 0, 0
    for number in range(starts):
        with empty.started() as (daemon, begin):
            wait_until_open(daemon)
            empty_s.append(time.perf_counter() - begin)
        with full.started() as (daemon, begin):
            ready_s.append(time.perf_counter() - begin)
            wait_until_open(daemon)
            open_s.append(time.perf_counter() - begin)
            restored = int(daemon.stats()["ssd.restored_chunks"])
            cpu_s = daemon.cpu_seconds()
            if number == starts - 1:
                advance(steps)
                wrong_bytes = _wrong_bytes(daemon, salt)
        advance(steps)
    if restored != chunks:
        raise KVPoolError(f"{restored} of {chunks} chunks were found again: the measured starts prove nothing")
    return [
        {
            "name": f"{chunks} chunks on disk, daemon killed",
            "starts": starts,
            "restored_chunks": restored,
            "ready_s": round(median(ready_s), 3),
            "ready_spread_s": spread(ready_s, 3),
            "ready_bar_s": READY_BAR_S,
            "open_s": round(median(open_s), 3),
            "open_spread_s": spread(open_s, 3),
            "open_empty_s": round(median(empty_s), 3),
            "open_s_per_million_chunks": round(per_million(median(open_s) - median(empty_s), chunks), 2),
            "open_bar_s_per_million_chunks": OPEN_BAR_S,
            "cpu_seconds": round(cpu_s, 3),
            "wrong_bytes": wrong_bytes,
        }
    ]


def reopen_disk_bytes(is_quick: bool) -> int:
    """Bytes of this benchmark's two tiers on the disk."""
    return 2 * _capacity(QUICK_CHUNKS if is_quick else CHUNKS)


def per_million(seconds: float, chunks: int) -> float:
    """Seconds for a million chunks, where `chunks` take these; nothing less than none."""
    return max(seconds, 0.0) / chunks * 1e6


class _Tier:
    """A tier's folder and the daemons over it, one after another. A daemon ends by SIGKILL, as in a crash."""

    def __init__(self, folder: Path, chunks: int) -> None:
        self._dram_bytes = max(DRAM_BYTES_MIN, chunks * CHUNK_BYTES * 5 // 4)
        self._options = (
            f"ssd.path={folder}",
            "ssd.create=true",
            f"ssd.capacity={_capacity(chunks)}B",
            f"ssd.max_chunks={2 * chunks}",
            f"dram.max_chunks={2 * chunks}",
        )

    @contextmanager
    def started(self) -> Iterator[tuple[MeasuredDaemon, float]]:
        """A daemon that answers, and when its start began; killed at the end."""
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as directory:
            socket = f"{directory}/kvpool.sock"
            begin = time.perf_counter()
            process = start_daemon(socket, self._dram_bytes, *self._options)
            try:
                wait_until_ready(socket, process)
                yield MeasuredDaemon(socket, process.pid, self._dram_bytes, is_own=True), begin
            finally:
                process.kill()
                process.wait()


def _capacity(chunks: int) -> int:
    """Room for the chunks and as many more, and for a catalogue of both; at least what a tier must have."""
    return max(32 << 20, SEGMENTS_SPARE * chunks * (SLOT_BYTES + CATALOGUE_BYTES_PER_CHUNK))


def _pool(daemon: MeasuredDaemon, salt: bytes) -> kv.Pool:
    return kv.connect(
        daemon.socket,
        model=MODEL,
        revision=REVISION,
        layout=ssd_layout(CHUNK_BYTES, layers=1),
        salt=salt,
        timeout_s=POOL_TIMEOUT_S,
    )


def _chain(pool: kv.Pool, number: int) -> kv.KeyChain:
    return pool.keys(
        np.random.default_rng(number).integers(0, 50_000, CHAIN * pool.layout.chunk_tokens, dtype=np.int32)
    )


def _fill(daemon: MeasuredDaemon, chunks: int, salt: bytes) -> None:
    """Store and demote chains of chunks, and sync."""
    with _pool(daemon, salt) as pool:
        payload, rows = Payload(pool.layout), np.zeros((CHAIN, CHUNK_BYTES), np.uint8)
        for number in range(chunks // CHAIN):
            keys = _chain(pool, number)
            payload.fill(rows, keys, 0)
            result = pool.save(keys, from_=rows).commit()
            if result is None or result.stored != CHAIN:
                raise KVPoolError(f"the daemon declined a save of {CHAIN} small chunks: {result}")
    if daemon.demote_all(DEMOTE_ALL_TIMEOUT_S)["left"]:
        raise KVPoolError("not all chunks were written down")


def _wrong_bytes(daemon: MeasuredDaemon, salt: bytes) -> int:
    """Load some chains and compare them. Raises KVPoolError when one is not there."""
    wrong = 0
    with _pool(daemon, salt) as pool:
        payload, rows = Payload(pool.layout), np.zeros((CHAIN, CHUNK_BYTES), np.uint8)
        for number in range(min(CHECKED_CHAINS, QUICK_CHUNKS // CHAIN)):
            keys = _chain(pool, number)
            rows.fill(POISON)
            with pool.acquire(pool.lookup(keys)) as lease:
                result = pool.load(lease, into=rows[: lease.chunks]).wait()
            if result.chunks != CHAIN:
                raise KVPoolError(f"{result.chunks} of {CHAIN} chunks came back: {result}")
            wrong += sum(each.wrong_bytes for each in payload.check(rows, keys, 0))
    return wrong
