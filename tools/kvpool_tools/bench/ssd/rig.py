"""Queue rig: the SSD tier's native queue without a daemon, with an arena, segment files, and raw files for the floor.

The queue is driven as the daemon drives it: jobs of packed rows, outcomes taken when its descriptor is readable, checksums
in a real index. Main thread of a command only.
"""

import os
import select
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import Deadline
from kvpool.config.config import OPTIONS
from kvpool.errors import KVPoolError
from kvpool.key_column import packed_bytes
from kvpool.packed_rows import MOVE_ROW
from kvpool.states import SaveState
from kvpool_tools.bench.disk import Bytes, RawFile

EXTENTS = 32
# As the tier has by default: reads on all threads, writes on half of them.
THREADS = int(OPTIONS["ssd.threads"].default)
WRITERS = max(1, THREADS // 2)
SEGMENTS = 4
ARENA_SEGMENTS = 8
JOBS_MAX = 64
JOBS_AHEAD = 3
TIMEOUT_S = 60.0
DEMAND = 0
STATUS_OK = 0
POISON = 0xA5
SIZES = {"0.5 MiB": 512 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "32 MiB": 32 << 20}
CHUNKS_MIN = 2
TOTAL_BYTES_MIN = CHUNKS_MIN * (4 << 20)


class QueueRig:
    """A queue over segment files with room for `chunks` chunks, which lie in an arena, and room there to read them into.

    With `beside_bytes`, also for one other chunk of that size in each segment, which are what `writing` writes.

    Invariant: the index has the checksums of the source chunks; nothing is under way between two calls.
    """

    def __init__(
        self, folder: Path, chunk_bytes: int, chunks: int, *, threads: int = THREADS, beside_bytes: int = 0
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = chunks
        slot_bytes = chunk_bytes + kvpool_native.SSD_HEADER_BYTES
        in_segment = -(-chunks // SEGMENTS)
        beside_slot_bytes = beside_bytes + kvpool_native.SSD_HEADER_BYTES if beside_bytes else 0
        segment_bytes = in_segment * slot_bytes + beside_slot_bytes
        self._files = kvpool_native.SsdFiles.open(str(folder), segment_bytes, SEGMENTS, True)
        capacity = max(max(2 * chunks, ARENA_SEGMENTS) * chunk_bytes, SEGMENTS * beside_bytes)
        geometry = kvpool_native.DirectoryGeometry.plan(
            (2 if beside_bytes else 1) * capacity, capacity, 2 * chunks + SEGMENTS
        )
        self._arena = kvpool_native.Mapping.create("kvpool-bench-arena", geometry.arena_bytes)
        self._arena.populate(0, geometry.arena_bytes)
        self._arena.collapse(0, geometry.arena_bytes)
        index = kvpool_native.Mapping.create("kvpool-bench-index", geometry.index_bytes)
        self._directory = kvpool_native.Directory(self._arena, index, geometry, os.urandom(16))
        for segment in range(geometry.segments):
            self._directory.mark_segment_ready(segment)
        self._index = kvpool_native.IndexView(index)
        self._sources, self._source_slots = self._reserve(chunk_bytes, chunks, seed=6, is_source=True)
        self._targets, self._target_slots = self._reserve(chunk_bytes, chunks, seed=8, is_source=False)
        numbers = np.arange(chunks, dtype=np.uint64)
        self._moves = _moves(5, numbers // in_segment * segment_bytes + numbers % in_segment * slot_bytes)
        self._beside_bytes = beside_bytes
        if beside_bytes:
            places = np.arange(SEGMENTS, dtype=np.uint64) * segment_bytes + in_segment * slot_bytes
            self._beside = _moves(10, places)
            beside = self._reserve(beside_bytes, SEGMENTS, seed=11, is_source=True)
            self._beside["arena_offset"], self._beside["arena_slot"] = beside
        self._epoch, self._namespace = os.urandom(16), os.urandom(32)
        self._queue = kvpool_native.SsdQueue(self._files, self._arena, index, threads, JOBS_MAX, self._files.is_direct)
        self._under_way: dict[int, int] = {}

    @property
    def is_direct(self) -> bool:
        """Whether I/O goes past the page cache."""
        return self._files.is_direct

    def close(self) -> None:
        """End the queue's threads."""
        self._queue.stop(TIMEOUT_S)

    def write(self, chunks: Sequence[int]) -> None:
        """Write chunks, in one job, and wait for all of them."""
        self._wait(self._start(chunks, is_write=True))

    def read(self, chunks: Sequence[int]) -> None:
        """Read chunks back, in one job of demand, and wait for all of them."""
        self._wait(self._start(chunks, is_write=False))

    @contextmanager
    def writing(self, chunks: Sequence[int]) -> Iterator[Callable[[], None]]:
        """While chunks, or those beside them, are written over and over; the yielded function is called between reads."""

        def keep_busy() -> None:
            count = SEGMENTS if self._beside_bytes else len(chunks)
            while sum(self._under_way.values()) < JOBS_AHEAD * count:
                if self._beside_bytes:
                    self._start_rows(self._beside, self._beside_bytes, is_write=True)
                else:
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
            self._bytes_at(self._targets[chunk])[:] = POISON

    def wrong_bytes(self, chunks: Sequence[int]) -> int:
        """Bytes of chunks that differ from those written."""
        wrong = 0
        for chunk in chunks:
            written, read = (self._bytes_at(places[chunk]) for places in (self._sources, self._targets))
            if not np.array_equal(written, read):
                wrong += int(np.count_nonzero(written != read))
        return wrong

    def _start(self, chunks: Sequence[int], *, is_write: bool) -> int:
        rows = self._moves[list(chunks)]
        rows["arena_offset"] = (self._sources if is_write else self._targets)[list(chunks)]
        rows["arena_slot"] = (self._source_slots if is_write else self._target_slots)[list(chunks)]
        return self._start_rows(rows, self.chunk_bytes, is_write=is_write)

    def _start_rows(self, rows: npt.NDArray[np.void], chunk_bytes: int, *, is_write: bool) -> int:
        common = (rows.tobytes(), self._epoch, self._namespace, EXTENTS, chunk_bytes // EXTENTS, self._index)
        job = self._queue.write(*common) if is_write else self._queue.read(*common, DEMAND)
        if not job:
            raise KVPoolError("the queue takes no job, expected room for one")
        self._under_way[job] = len(rows)
        return job

    def _wait(self, job: int) -> None:
        deadline = Deadline(TIMEOUT_S)
        while job in self._under_way:
            ready, _, _ = select.select([self._queue.fileno()], [], [], deadline.remaining_s())
            if not ready:
                raise KVPoolError(f"the disk did not answer within {TIMEOUT_S:.0f} s")
            self._take()

    def _take(self) -> None:
        for outcome in self._queue.take_outcomes():
            if outcome.status != STATUS_OK:
                raise KVPoolError(f"a chunk came to status {outcome.status}, expected {STATUS_OK}")
            self._under_way[outcome.job] -= 1
            if not self._under_way[outcome.job]:
                del self._under_way[outcome.job]

    def _reserve(
        self, chunk_bytes: int, chunks: int, *, seed: int, is_source: bool
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Offsets in the arena, and slots: those of the sources are filled and have their checksums in the index."""
        size_class = self._directory.add_class(chunk_bytes, EXTENTS)
        namespace = self._directory.add_namespace()
        contents = np.frombuffer(np.random.default_rng(7).bytes(chunk_bytes), np.uint8)
        keys = np.random.default_rng(seed).bytes(packed_bytes(chunks))
        made = self._directory.reserve(namespace, size_class, b"", keys, 1)
        assert made.states.count(SaveState.RESERVED) == chunks
        places = np.frombuffer(made.offsets, "<u8")
        checksums = bytes(0 if is_source else 4 * EXTENTS * chunks)
        if is_source:
            for number, place in enumerate(places):
                # A swapped chunk is detected as well as a wrong byte.
                np.bitwise_xor(contents, np.uint8(number % 251 + 1), out=self._bytes_at(place, chunk_bytes))
                checksums += kvpool_native.extent_checksums(self._arena, int(place), chunk_bytes // EXTENTS, EXTENTS)
        self._directory.commit(made.id, 0, checksums, 1)
        return places, np.frombuffer(made.slots, "<u8")

    def _bytes_at(self, place: np.uint64, size: int = 0) -> Bytes:
        return self._arena.view()[int(place) : int(place) + (size or self.chunk_bytes)]


def _moves(seed: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    """Rows of chunks at places in the files."""
    moves = np.zeros(len(places), MOVE_ROW)
    moves["key"] = np.frombuffer(np.random.default_rng(seed).bytes(packed_bytes(len(places))), MOVE_ROW["key"])
    moves["offset"] = places
    moves["generation"] = np.arange(len(places), dtype=np.uint64) + 1
    return moves


def arena_bytes(chunks: int, chunk_bytes: int) -> Bytes:
    """Memory of the kind that an arena has, [chunks, chunk_bytes], with incompressible bytes."""
    size = chunks * chunk_bytes
    mapping = kvpool_native.Mapping.create("kvpool-bench-raw", size)
    mapping.populate(0, size)
    mapping.collapse(0, size)
    buffer = mapping.view().reshape(chunks, chunk_bytes)
    buffer[:] = np.frombuffer(np.random.default_rng(9).bytes(chunk_bytes), np.uint8)
    return buffer


@contextmanager
def measured_queue(folder: Path, chunk_bytes: int, total: int) -> Iterator[tuple[QueueRig, RawFile, RawFile]]:
    """A queue, and raw files of as many chunks: one as deep as the tier writes, one as deep as it reads."""
    chunks = total // chunk_bytes
    rig = QueueRig(folder / f"tier-{chunk_bytes}", chunk_bytes, chunks)
    written = RawFile(folder / f"raw-written-{chunk_bytes}", chunk_bytes, chunks, WRITERS)
    read = RawFile(folder / f"raw-read-{chunk_bytes}", chunk_bytes, chunks, THREADS)
    try:
        yield rig, written, read
    finally:
        rig.close()
        written.close()
        read.close()
        shutil.rmtree(folder / f"tier-{chunk_bytes}")


def sizes_within(total: int) -> dict[str, int]:
    """The chunk sizes that a pass of `total` bytes has at least two chunks of."""
    return {name: size for name, size in SIZES.items() if CHUNKS_MIN * size <= total}


def queue_disk_bytes(total: int) -> int:
    """Bytes of a queue and its raw files on the disk, one chunk size after the other; segments are filled unevenly."""
    return 3 * total + SEGMENTS * max(sizes_within(total).values())
