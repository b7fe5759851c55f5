"""`bench ssd`, the tier's queue alone: chunks between an arena and segment files, against raw I/O of as many bytes.

The native queue is driven as the daemon drives it, without the daemon: one job of all chunks for a rate, jobs of one chunk
for a latency. A round takes raw, queue and raw again in each direction, so that the disk's moods hit all alike, and a ratio
is to the mean of the two raw passes around it. The first round writes what has never been written and is not counted.
What was read is compared with what was written after each round, untimed.

Main thread of a command only.
"""

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.cli.bench_disk import Bytes, RawFile, fio_gb_per_s
from kvpool.cli.bench_measure import median, quantiles_us, rates, spread, timed_s, timed_with_cpu_s
from kvpool.clock import Deadline
from kvpool.config import OPTIONS
from kvpool.errors import KVPoolError
from kvpool.types import SaveState

BAR = 0.95
# Below this a chunk's own costs count: the bar is for chunks from here on.
BAR_BYTES_MIN = 1 << 20
TAIL_BAR = 3.0
LAYERS = 32
SIZES = {"0.5 MiB": 512 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "32 MiB": 32 << 20}
TAIL_SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20}
ROUNDS, QUICK_ROUNDS = 11, 2
SINGLES, QUICK_SINGLES = 8, 2
TAIL_ROUNDS, TAIL_SINGLES = 10, 40
QUICK_TAIL_ROUNDS, QUICK_TAIL_SINGLES = 2, 10
SEGMENTS = 4
ARENA_SEGMENTS = 8
JOBS_MAX = 64
JOBS_AHEAD = 3
TIMEOUT_S = 60.0
DEMAND = 0
STATUS_OK = 0
THREADS = int(OPTIONS["ssd.threads"].default)
WRITERS = max(1, THREADS // 2)

Row = dict[str, Any]
_MOVE = np.dtype(
    [("key", "V32"), ("parent", "V32"), ("offset", "<u8"), ("arena_offset", "<u8"), ("generation", "<u8")]
)


class QueueRig:
    """A queue over segment files with room for `chunks` chunks, which lie in an arena, and room there to read them into.

    Invariant: the index has the checksums of the source chunks; nothing is under way between two calls.
    """

    def __init__(self, folder: Path, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = chunks
        slot_bytes = chunk_bytes + kvpool_native.SSD_HEADER_BYTES
        in_segment = -(-chunks // SEGMENTS)
        self._files = kvpool_native.SsdFiles.open(str(folder), in_segment * slot_bytes, SEGMENTS, True)
        capacity = max(2 * chunks, ARENA_SEGMENTS) * chunk_bytes
        geometry = kvpool_native.DirectoryGeometry.plan(capacity, capacity, 2 * chunks)
        self._arena = kvpool_native.Mapping.create("kvpool-bench-arena", geometry.arena_bytes)
        self._arena.populate(0, geometry.arena_bytes)
        self._arena.collapse(0, geometry.arena_bytes)
        index = kvpool_native.Mapping.create("kvpool-bench-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self._arena, index, geometry, os.urandom(16))
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self._index = kvpool_native.IndexView(index)
        self._sources, self._targets = self._reserve(is_source=True), self._reserve(is_source=False)
        self._moves = np.zeros(chunks, _MOVE)
        self._moves["key"] = np.frombuffer(np.random.default_rng(5).bytes(32 * chunks), "V32")
        numbers = np.arange(chunks, dtype=np.uint64)
        places = numbers // in_segment * (in_segment * slot_bytes) + numbers % in_segment * slot_bytes
        self._moves["offset"] = places
        self._moves["generation"] = numbers + 1
        self._epoch, self._namespace = os.urandom(16), os.urandom(32)
        self._queue = kvpool_native.SsdQueue(self._files, self._arena, index, THREADS, JOBS_MAX)
        self._under_way: dict[int, int] = {}

    @property
    def is_direct(self) -> bool:
        """Whether I/O goes past the page cache."""
        return self._files.is_direct

    def close(self) -> None:
        """End the queue's threads."""
        self._queue.stop()

    def write(self, chunks: Sequence[int]) -> None:
        """Write chunks down, in one job, and wait for all of them."""
        self._wait(self._start(chunks, is_write=True))

    def read(self, chunks: Sequence[int]) -> None:
        """Read chunks back, in one job of demand, and wait for all of them."""
        self._wait(self._start(chunks, is_write=False))

    @contextmanager
    def writing(self, chunks: Sequence[int]) -> Iterator[Callable[[], None]]:
        """While chunks are written over and over; what it yields keeps jobs waiting and is called between reads."""

        def keep_busy() -> None:
            while sum(self._under_way.values()) < JOBS_AHEAD * len(chunks):
                self._start(chunks, is_write=True)
            self._take()

        keep_busy()
        yield keep_busy
        for job in list(self._under_way):
            self._wait(job)

    @property
    def written_bytes(self) -> int:
        """Bytes that have been written, headers included."""
        return self._queue.stats()["written_bytes"]

    def forget(self) -> None:
        """Overwrite what was read."""
        for chunk in range(self.chunks):
            self._bytes_at(self._targets[chunk])[:] = 0xA5

    def wrong_bytes(self) -> int:
        """Bytes that came back other than they were written."""
        return sum(
            int(np.count_nonzero(self._bytes_at(source) != self._bytes_at(target)))
            for source, target in zip(self._sources, self._targets, strict=True)
        )

    def _start(self, chunks: Sequence[int], *, is_write: bool) -> int:
        rows = self._moves[list(chunks)]
        rows["arena_offset"] = (self._sources if is_write else self._targets)[list(chunks)]
        common = (rows.tobytes(), self._epoch, self._namespace, LAYERS, self.chunk_bytes // LAYERS)
        job = self._queue.write(*common, self._index) if is_write else self._queue.read(*common, DEMAND)
        if not job:
            raise KVPoolError("the queue takes no job, expected room for one")
        self._under_way[job] = len(chunks)
        return job

    def _wait(self, job: int) -> None:
        deadline = Deadline(TIMEOUT_S)
        while job in self._under_way:
            ready, _, _ = select.select([self._queue.fileno()], [], [], deadline.remaining_s())
            if not ready:
                raise KVPoolError(f"the disk did not answer within {TIMEOUT_S:.0f} s")
            self._take()

    def _take(self) -> None:
        for job, _, status, _ in self._queue.take_outcomes():
            if status != STATUS_OK:
                raise KVPoolError(f"a chunk came to status {status}, expected {STATUS_OK}")
            self._under_way[job] -= 1
            if not self._under_way[job]:
                del self._under_way[job]

    def _reserve(self, *, is_source: bool) -> npt.NDArray[np.uint64]:
        """Slots in the arena: those of the sources are filled and have their checksums in the index."""
        size_class = self._directory.add_class(self.chunk_bytes, LAYERS)
        namespace = self._directory.add_namespace()
        random = np.random.default_rng(7)
        keys = np.random.default_rng(6 if is_source else 8).bytes(32 * self.chunks)
        reservation, states, offsets, _ = self._directory.reserve(namespace, size_class, b"", keys, 1)
        assert states.count(SaveState.RESERVED) == self.chunks
        places = np.frombuffer(offsets, "<u8")
        if is_source:
            checksums = b""
            for place in places:
                self._bytes_at(place)[:] = np.frombuffer(random.bytes(self.chunk_bytes), np.uint8)
                checksums += kvpool_native.extent_checksums(
                    self._arena, int(place), self.chunk_bytes // LAYERS, LAYERS
                )
            self._directory.commit(reservation, 0, checksums, 1)
        return places

    def _bytes_at(self, place: np.uint64) -> Bytes:
        return self._arena.view()[int(place) : int(place) + self.chunk_bytes]


@dataclass(slots=True)
class _Rounds:
    """What the counted rounds of one direction gave, in bytes a second; ratios are to the raw passes around."""

    raw: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    raw_one_s: list[float] = field(default_factory=list)
    one_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    raw_cpu_s: float = 0.0
    moved_bytes: int = 0

    def add(self, total: int, floors: Sequence[tuple[float, float]], measured: tuple[float, float]) -> None:
        """Count one round: seconds with CPU seconds of the two raw passes, and of the one between them."""
        self.raw += [total / seconds / 1e9 for seconds, _ in floors]
        self.queue.append(total / measured[0] / 1e9)
        self.ratios.append(sum(seconds for seconds, _ in floors) / 2 / measured[0])
        self.cpu_s += measured[1]
        self.raw_cpu_s += sum(cpu_s for _, cpu_s in floors) / 2
        self.moved_bytes += total

    def columns(self, name: str) -> Row:
        """Columns of one direction, `name` being demote or promote."""
        gb = self.moved_bytes / 1e9
        return {
            **rates(f"raw_{name}", self.raw),
            **rates(name, self.queue),
            f"{name}_ratio": round(median(self.ratios), 3),
            f"{name}_ratio_spread": spread(self.ratios),
            **quantiles_us(f"raw_{name}_one_", self.raw_one_s),
            **quantiles_us(f"{name}_one_", self.one_s),
            f"{name}_cpu_seconds_per_gb": round(self.cpu_s / gb, 3),
            f"raw_{name}_cpu_seconds_per_gb": round(self.raw_cpu_s / gb, 3),
        }


def bench_queue(folder: Path, total: int, is_quick: bool, advance: Callable[[int], None]) -> list[Row]:
    """One row for each chunk size: rates of `total` bytes and latencies of one chunk, both ways."""
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    steps = len(SIZES) * rounds
    return [_size(folder, name, size, total, is_quick, lambda: advance(steps)) for name, size in SIZES.items()]


def bench_tail(folder: Path, total: int, is_quick: bool, advance: Callable[[int], None]) -> list[Row]:
    """One row for each chunk size: demand reads of one chunk, idle and while the tier writes at full speed."""
    rounds = QUICK_TAIL_ROUNDS if is_quick else TAIL_ROUNDS
    steps = len(TAIL_SIZES) * rounds
    return [_tail(folder, name, size, total, is_quick, lambda: advance(steps)) for name, size in TAIL_SIZES.items()]


@contextmanager
def _rig(folder: Path, chunk_bytes: int, total: int) -> Iterator[tuple[QueueRig, RawFile, RawFile]]:
    """A queue, and raw files of the same size as deep as the tier writes and reads."""
    chunks = max(2, total // chunk_bytes)
    rig = QueueRig(folder / f"tier-{chunk_bytes}", chunk_bytes, chunks)
    raw = [
        RawFile(folder / f"raw-{chunk_bytes}-{depth}", chunk_bytes, chunks, depth=depth) for depth in (WRITERS, THREADS)
    ]
    try:
        yield rig, raw[0], raw[1]
    finally:
        rig.close()
        for file in raw:
            file.close()


def _size(
    folder: Path, name: str, chunk_bytes: int, total: int, is_quick: bool, advance: Callable[[], None]
) -> Row:
    demoted, promoted = _Rounds(), _Rounds()
    wrong_bytes = 0
    with _rig(folder, chunk_bytes, total) as (rig, writing, reading):
        everything = range(rig.chunks)
        moved = rig.chunks * chunk_bytes
        buffer = _raw_buffer(rig.chunks, chunk_bytes)
        reading.write(buffer)
        for number in range(1 + (QUICK_ROUNDS if is_quick else ROUNDS)):
            rig.forget()
            writes = _between(lambda: writing.write(buffer), lambda: rig.write(everything))
            reads = _between(lambda: reading.read(buffer), lambda: rig.read(everything))
            wrong_bytes += rig.wrong_bytes()
            if not number:
                continue
            demoted.add(moved, *writes)
            promoted.add(moved, *reads)
            for chunk in range(QUICK_SINGLES if is_quick else SINGLES):
                one = chunk * (number + 1) % rig.chunks
                demoted.raw_one_s.append(timed_s(lambda: writing.write_one(buffer, one)))  # noqa: B023 - called at once
                demoted.one_s.append(timed_s(lambda: rig.write([one])))  # noqa: B023 - called at once
                promoted.raw_one_s.append(timed_s(lambda: reading.read_one(buffer, one)))  # noqa: B023 - called at once
                promoted.one_s.append(timed_s(lambda: rig.read([one])))  # noqa: B023 - called at once
            advance()
        common = {"chunk_bytes": chunk_bytes, "chunks": rig.chunks}
        fio_write, fio_read = (
            (None, None)
            if is_quick
            else (
                fio_gb_per_s(writing.path, is_write=True, depth=WRITERS, **common),
                fio_gb_per_s(reading.path, is_write=False, depth=THREADS, **common),
            )
        )
        io = f"threads, {'direct' if rig.is_direct else 'page cache'}"
    bar = BAR if chunk_bytes >= BAR_BYTES_MIN else None
    return {
        "chunk": name,
        "chunks": moved // chunk_bytes,
        "rounds": len(demoted.queue),
        "ssd_io": io,
        "raw_demote_depth": WRITERS,
        "raw_promote_depth": THREADS,
        **demoted.columns("demote"),
        "fio_demote_gb_per_s": fio_write and round(fio_write, 2),
        "demote_bar": bar,
        **promoted.columns("promote"),
        "fio_promote_gb_per_s": fio_read and round(fio_read, 2),
        "promote_bar": bar,
        "ratio": round(min(median(demoted.ratios), median(promoted.ratios)), 3),
        "cpu_seconds": round(demoted.cpu_s + promoted.cpu_s, 3),
        "wrong_bytes": wrong_bytes,
    }


def _between(
    raw: Callable[[], float], measured: Callable[[], None]
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Seconds with CPU seconds of two raw passes and of what is measured between them."""
    floors = [_timed_raw(raw)]
    seconds = timed_with_cpu_s(measured)
    floors.append(_timed_raw(raw))
    return floors, seconds


def _timed_raw(raw: Callable[[], float]) -> tuple[float, float]:
    """A raw pass tells its own seconds, without those of its threads' start."""
    before = time.process_time()
    seconds = raw()
    return seconds, time.process_time() - before


def _raw_buffer(chunks: int, chunk_bytes: int) -> Bytes:
    """Memory of the same kind as an arena's, for raw passes, that is no page of zeros."""
    mapping = kvpool_native.Mapping.create("kvpool-bench-raw", chunks * chunk_bytes)
    mapping.populate(0, chunks * chunk_bytes)
    mapping.collapse(0, chunks * chunk_bytes)
    buffer = mapping.view().reshape(chunks, chunk_bytes)
    buffer[:] = np.frombuffer(np.random.default_rng(9).bytes(chunk_bytes), np.uint8)
    return buffer


def _tail(folder: Path, name: str, chunk_bytes: int, total: int, is_quick: bool, advance: Callable[[], None]) -> Row:
    samples: dict[str, list[float]] = {"raw_idle": [], "raw_busy": [], "idle": [], "busy": []}
    written_bytes, busy_s = 0, 0.0
    with _rig(folder / "tail", chunk_bytes, total) as (rig, raw, _):
        half = max(1, rig.chunks // 2)
        read, written = range(half), range(half, rig.chunks)
        buffer, into = _raw_buffer(rig.chunks, chunk_bytes), _raw_buffer(rig.chunks, chunk_bytes)
        raw.write(buffer)
        rig.write(range(rig.chunks))
        for number in range(QUICK_TAIL_ROUNDS if is_quick else TAIL_ROUNDS):
            ones = [read[(number + n) % half] for n in range(QUICK_TAIL_SINGLES if is_quick else TAIL_SINGLES)]
            samples["raw_idle"] += [timed_s(lambda: raw.read_one(into, one)) for one in ones]  # noqa: B023
            samples["idle"] += [timed_s(lambda: rig.read([one])) for one in ones]  # noqa: B023 - called at once
            with raw.writing(buffer):
                samples["raw_busy"] += [timed_s(lambda: raw.read_one(into, one)) for one in ones]  # noqa: B023
            before, start = rig.written_bytes, time.perf_counter()
            with rig.writing(written) as keep_busy:
                for one in ones:
                    keep_busy()
                    samples["busy"].append(timed_s(lambda: rig.read([one])))  # noqa: B023 - called at once
                written_bytes += rig.written_bytes - before
                busy_s += time.perf_counter() - start
            advance()
        wrong_bytes = sum(rig.wrong_bytes_of(chunk) for chunk in set(ones))
    p99 = {kind: float(np.quantile(seconds, 0.99)) for kind, seconds in samples.items()}
    return {
        "chunk": name,
        "samples": len(samples["busy"]),
        **quantiles_us("idle_", samples["idle"]),
        **quantiles_us("busy_", samples["busy"]),
        "p99_ratio": round(p99["busy"] / p99["idle"], 2),
        "p99_bar": TAIL_BAR,
        **quantiles_us("raw_idle_", samples["raw_idle"]),
        **quantiles_us("raw_busy_", samples["raw_busy"]),
        "raw_p99_ratio": round(p99["raw_busy"] / p99["raw_idle"], 2),
        "written_gb_per_s": round(written_bytes / busy_s / 1e9, 2),
        "wrong_bytes": wrong_bytes,
    }
