"""`bench ssd`, end to end through a daemon: save, demote, drop from DRAM, acquire and load, against raw I/O.

Demote is `flush --demote`: every chunk on the disk and synced; its floor is a raw pass with fdatasync. Promote counts from the
acquire to the last verified layer in the engine's memory, which is a copy more than its floor, a raw read. First layer is when
layer 0 of every chunk can be used, while the rest is still on its way. A round takes raw, measured and raw again in each
direction; the first one writes blocks that were never written and is not counted. Every byte is compared with the payload of
its key, untimed. Main thread of a command only.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvpool_client as kv
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool_tools.bench.daemon import REVISION, MeasuredDaemon, own_daemon, wait_until_open
from kvpool_tools.bench.disk import Bytes, RawFile
from kvpool_tools.bench.measure import median, spread
from kvpool_tools.bench.payload import Payload
from kvpool_tools.bench.ssd.rig import EXTENTS, POISON, THREADS, WRITERS, arena_bytes, sizes_within
from kvpool_tools.bench.ssd.rounds import Rounds, Timed, timed_raw

MODEL = "bench-ssd"
CHUNK_TOKENS = 64
PLANES = 2
ROUNDS, QUICK_ROUNDS = 5, 1
POOL_TIMEOUT_S = 30.0
DEMOTE_ALL_TIMEOUT_S = 120.0
POLL_S = 0.01
# Room in DRAM, so that nothing is demoted before the request; on disk, so that nothing is evicted. A tier is cut in at least
# eight segments, and a slot is more than its chunk.
DRAM_FACTOR = 4
DISK_FACTOR = 4
SEGMENT_FACTOR = 10

Row = dict[str, Any]


def daemon_disk_bytes(total: int) -> int:
    """Bytes of this benchmark on the disk, with two raw files beside the tier."""
    return _tier_bytes(total) + 2 * total


def bench_daemon(folder: Path, total: int, is_quick: bool, advance: Callable[[int], None]) -> list[Row]:
    """One row for each chunk size: rates of `total` bytes both ways, and time to the first layer."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    sizes = sizes_within(total)
    steps = len(sizes) * (rounds + 1)
    options = (f"ssd.path={folder / 'tier'}", "ssd.create=true", f"ssd.capacity={_tier_bytes(total)}B")
    rows = []
    with own_daemon(DRAM_FACTOR * total, *options) as daemon:
        wait_until_open(daemon)
        for name, chunk_bytes in sizes.items():
            with _comparison(daemon, folder, chunk_bytes, total // chunk_bytes) as comparison:
                for number in range(rounds + 1):
                    comparison.run(number)
                    advance(steps)
                rows.append(comparison.row(name))
    return rows


def ssd_layout(chunk_bytes: int, *, layers: int = EXTENTS) -> kv.Layout:
    """A layout with chunks of this size."""
    head_dim, rest = divmod(chunk_bytes, layers * PLANES * CHUNK_TOKENS)
    assert not rest
    return kv.Layout(
        layers=layers, planes=PLANES, kv_heads=1, head_dim=head_dim, dtype="uint8", chunk_tokens=CHUNK_TOKENS
    )


def _tier_bytes(total: int) -> int:
    """Room for every round's chunks, in segments that the largest of them fit."""
    return max(DISK_FACTOR * total, SEGMENT_FACTOR * max(sizes_within(total).values()))


@contextmanager
def _comparison(daemon: MeasuredDaemon, folder: Path, chunk_bytes: int, chunks: int) -> Iterator["_Comparison"]:
    raw = [RawFile(folder / f"raw-{depth}", chunk_bytes, chunks, depth) for depth in (WRITERS, THREADS)]
    layout = ssd_layout(chunk_bytes)
    try:
        with kv.connect(
            daemon.socket, model=MODEL, revision=REVISION, layout=layout, salt=os.urandom(16), timeout_s=POOL_TIMEOUT_S
        ) as pool:
            yield _Comparison(daemon, pool, raw[0], raw[1])
    finally:
        for file in raw:
            file.close()


class _Comparison:
    """One chunk size through one daemon. Invariant: between two rounds the daemon has none of its chunks."""

    def __init__(self, daemon: MeasuredDaemon, pool: kv.Pool, written: RawFile, read: RawFile) -> None:
        self._daemon, self._pool = daemon, pool
        self._written, self._read = written, read
        self._chunks, self._chunk_bytes = written.chunks, written.chunk_bytes
        self._buffer: Bytes = arena_bytes(self._chunks, self._chunk_bytes)
        self._rows: Bytes = np.zeros((self._chunks, self._chunk_bytes), np.uint8)
        self._payload = Payload(pool.layout)
        self._demoted, self._promoted = Rounds(), Rounds()
        self._first_layer_s: list[float] = []
        self._whole_s: list[float] = []
        self._wrong_bytes = 0
        self._io = str(daemon.info()["ssd_io"])
        read.write(self._buffer)

    def run(self, number: int) -> None:
        """Round `number`; round 0 is not counted."""
        tokens = np.random.default_rng(number).integers(0, 50_000, self._chunks * CHUNK_TOKENS, dtype=np.int32)
        keys = self._pool.keys(tokens)
        self._payload.fill(self._rows, keys, 0)
        saved = self._pool.save(keys, from_=self._rows).commit()
        if saved is None or saved.stored != self._chunks:
            raise KVPoolError(f"the daemon declined a save of {self._chunks} chunks: {saved}")
        floors = [timed_raw(lambda: self._written.write(self._buffer, is_synced=True))]
        demoted = self._timed(self._demote)
        floors.append(timed_raw(lambda: self._written.write(self._buffer, is_synced=True)))
        self._daemon.forget(MODEL, "dram")
        self._rows.fill(POISON)
        read_floors = [timed_raw(lambda: self._read.read(self._buffer))]
        first_layer_s = []
        promoted = self._timed(lambda: first_layer_s.append(self._promote(keys)))
        read_floors.append(timed_raw(lambda: self._read.read(self._buffer)))
        self._wrong_bytes += sum(wrong.wrong_bytes for wrong in self._payload.check(self._rows, keys, 0))
        self._forget(keys)
        if number:
            moved = self._chunks * self._chunk_bytes
            self._demoted.add_round(moved, floors, demoted)
            self._promoted.add_round(moved, read_floors, promoted)
            self._first_layer_s += first_layer_s
            self._whole_s.append(promoted[0])

    def row(self, name: str) -> Row:
        """The row with all measurements."""
        shares = [first / whole for first, whole in zip(self._first_layer_s, self._whole_s, strict=True)]
        return {
            "chunk": name,
            "chunks": self._chunks,
            "rounds": len(self._whole_s),
            "ssd_io": self._io,
            **self._demoted.columns("demote", self._chunk_bytes),
            **self._promoted.columns("promote", self._chunk_bytes),
            "ratio": round(min(self._demoted.ratio, self._promoted.ratio), 3),
            "layers": EXTENTS,
            "first_layer_ms": round(median(self._first_layer_s) * 1e3, 2),
            "first_layer_spread_ms": spread([seconds * 1e3 for seconds in self._first_layer_s]),
            "whole_ms": round(median(self._whole_s) * 1e3, 2),
            "first_layer_share": round(median(shares), 3),
            "cpu_seconds": round(self._demoted.cpu_s + self._promoted.cpu_s, 3),
            "wrong_bytes": self._wrong_bytes,
        }

    def _timed(self, call: Callable[[], None]) -> Timed:
        """Seconds, and CPU seconds of this process and the daemon together."""
        cpu_s, start = time.process_time() + self._daemon.cpu_seconds(), time.perf_counter()
        call()
        return time.perf_counter() - start, time.process_time() + self._daemon.cpu_seconds() - cpu_s

    def _demote(self) -> None:
        report = self._daemon.demote_all(DEMOTE_ALL_TIMEOUT_S)
        if report["left"]:
            raise KVPoolError(f"{report['left']} chunks were not written down")

    def _promote(self, keys: kv.KeyChain) -> float:
        """Load everything; seconds until layer 0 of every chunk was in place."""
        start = time.perf_counter()
        with self._pool.acquire(self._pool.lookup(keys)) as lease:
            if lease.chunks != self._chunks:
                raise KVPoolError(f"{lease.chunks} of {self._chunks} chunks were leased")
            load = self._pool.load(lease, into=self._rows)
            load.wait_layer(0)
            first_layer_s = time.perf_counter() - start
            result = load.wait()
        if result.chunks != self._chunks:
            raise KVPoolError(f"a load of {self._chunks} chunks ended early: {result}")
        return first_layer_s

    def _forget(self, keys: kv.KeyChain) -> None:
        """Drop the round's chunks; those that a running promotion holds are dropped when it has ended."""
        deadline = Deadline(POOL_TIMEOUT_S)
        self._daemon.forget(MODEL)
        while self._pool.lookup(keys).chunks and not deadline.has_passed():
            time.sleep(POLL_S)
            self._daemon.forget(MODEL)
