"""The SSD tier: segment files, their slots, and what is known of them after a restart.

It owns the files, the I/O queue, the catalogue and the directory of slots; which chunk is worth writing or reading is
decided elsewhere. Nothing here stops the DRAM tier: what goes wrong changes the state and is a miss.

    STARTING ──files open, catalogue read──► OK ◄──tried again, later each time──┐
        └──cannot be opened──► OFFLINE       └──I/O or the catalogue fails──► READONLY ──it fails on and on──► OFFLINE

Control thread only, but for `open`, `probe` and `close`, which block and belong in an executor.

Invariant: files and catalogue together never take more than the capacity.
"""

import logging
import os
import shutil
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool import failpoint
from kvpool.config import SsdConfig
from kvpool.errors import ConfigError, KVPoolError
from kvpool.tiers.catalogue import Catalogue, NamespaceRecord, new_epoch, read_epoch
from kvpool.tiers.catalogue_rows import Row

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
# A record takes about 150 bytes in LMDB; the map has room for four times what is needed, because full maps are slow.
CATALOGUE_BYTES_PER_CHUNK = 640
CATALOGUE_BYTES_MIN = 1 << 20
SEGMENTS_MIN = 8
CHUNK_BYTES_TYPICAL_MIN = 256 << 10
CHUNK_BYTES_SMALL = 16 << 10
CHUNKS_SMALL_TIER = 1 << 16
QUEUE_JOBS = 1024
ERRORS_UNTIL_OFFLINE = 8


class TierState(IntEnum):
    """Whether the tier can be used; see the module's head."""

    STARTING = 0
    OK = 1
    READONLY = 2
    OFFLINE = 3


class SsdStatus(IntEnum):
    """What became of one chunk's I/O; the native module's codes."""

    OK = 0
    BAD_MAGIC = 1
    NEWER_VERSION = 2
    BAD_HEADER = 3
    OTHER_EPOCH = 4
    OTHER_KEY = 5
    OTHER_NAMESPACE = 6
    OTHER_GENERATION = 7
    OTHER_GEOMETRY = 8
    BAD_CHECKSUM = 9
    SHORT_READ = 10
    IO_ERROR = 11
    CANCELLED = 12
    BAD_SOURCE = 13

    @property
    def is_corruption(self) -> bool:
        """Whether the bytes on disk are not the chunk's."""
        return SsdStatus.BAD_MAGIC <= self <= SsdStatus.SHORT_READ


class SsdUnavailable(KVPoolError):
    """The tier cannot be opened; the text says why."""


@dataclass(frozen=True, slots=True)
class SsdPlan:
    """The sizes of a tier, derived from the configuration before anything is opened."""

    path: Path
    segment_bytes: int
    segments: int
    max_chunks: int
    catalogue_bytes: int
    is_direct: bool
    threads: int
    queue_jobs: int
    checkpoint_s: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier life left: rows in the order of restoring, and the namespaces their numbers mean."""

    rows: "npt.NDArray[np.void]"
    namespaces: dict[int, NamespaceRecord]
    bad_rows: int


def plan_ssd(config: SsdConfig) -> SsdPlan:
    """Cut a capacity in segment files and a catalogue."""
    capacity = config.capacity
    derived = max(capacity // CHUNK_BYTES_TYPICAL_MIN, min(capacity // CHUNK_BYTES_SMALL, CHUNKS_SMALL_TIER))
    chunks = config.max_chunks or derived
    catalogue_bytes = max(CATALOGUE_BYTES_MIN, -(-chunks * CATALOGUE_BYTES_PER_CHUNK // PAGE_BYTES) * PAGE_BYTES)
    data_bytes = capacity - catalogue_bytes
    wanted = min(config.segment, max(data_bytes, 0) // SEGMENTS_MIN)
    segment_bytes = wanted // PAGE_BYTES * PAGE_BYTES
    if segment_bytes < 2 * PAGE_BYTES:
        raise ConfigError(
            [
                f"ssd.capacity is {capacity}, expected more: "
                f"the catalogue of {chunks} chunks (ssd.max_chunks) takes {catalogue_bytes}"
            ]
        )
    return SsdPlan(
        path=Path(config.path),
        segment_bytes=segment_bytes,
        segments=data_bytes // segment_bytes,
        max_chunks=chunks,
        catalogue_bytes=catalogue_bytes,
        is_direct=config.direct,
        threads=config.threads,
        queue_jobs=QUEUE_JOBS,
        checkpoint_s=config.checkpoint_interval,
    )


class SsdTier:
    """The tier of one daemon."""

    def __init__(self, plan: SsdPlan, arena: kvpool_native.Mapping, index: kvpool_native.Mapping, epoch: bytes) -> None:
        self.plan = plan
        self._arena = arena
        self._index = index
        self._index_view = kvpool_native.IndexView(index)
        geometry = kvpool_native.DirectoryGeometry.plan_files(plan.segment_bytes, plan.segments, plan.max_chunks)
        self._slots_index = kvpool_native.Mapping.create("kvpool-ssd-slots", geometry.index_bytes)
        self.directory = kvpool_native.Directory.of_files(self._slots_index, geometry, epoch)
        for segment in range(plan.segments):
            self.directory.mark_segment_ready(segment)
        self.state = TierState.STARTING
        self.state_reason = ""
        self.pool_epoch = b""
        self.io_errors = 0
        self.corrupt_chunks = 0
        self._files: kvpool_native.SsdFiles | None = None
        self._queue: kvpool_native.SsdQueue | None = None
        self._catalogue: Catalogue | None = None
        self._recency = 1
        self._read_errors = 0

    def __repr__(self) -> str:
        return f"<SsdTier {self.plan.path} {self.state.name.lower()}>"

    @property
    def can_read(self) -> bool:
        """Whether chunks can be promoted."""
        return self._queue is not None and self.state in (TierState.OK, TierState.READONLY)

    @property
    def can_write(self) -> bool:
        """Whether chunks can be demoted."""
        if self._catalogue is not None and self._catalogue.failure is not None and self.state == TierState.OK:
            self.become(TierState.READONLY, f"because its catalogue cannot be written: {self._catalogue.failure}")
        return self._queue is not None and self.state == TierState.OK

    @property
    def backend(self) -> str:
        """How I/O is done, for operators."""
        if self._files is None:
            return "none"
        return "threads, direct" if self._files.is_direct else "threads, page cache"

    def open(self) -> Recovered:
        """Open or make everything, and read what an earlier life left. Raises SsdUnavailable. Blocks."""
        try:
            self.plan.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            catalogue_path = self.plan.path / "catalogue"
            found = read_epoch(catalogue_path)
            if found is None:
                _remove_segments(self.plan.path)
            self.pool_epoch = found or new_epoch()
            failpoint.reach("daemon.ssd.open_files")
            self._files = self._open_files(catalogue_path)
            _remove_segments(self.plan.path, first=self.plan.segments)
            failpoint.reach("daemon.ssd.open_catalogue")
            self._catalogue = Catalogue(
                catalogue_path, self.plan.catalogue_bytes, self.pool_epoch, sync_data=self._files.sync
            )
            rows, namespaces, bad = self._catalogue.load()
            self._recency = int(rows["recency"].max()) + 1 if len(rows) else 1
            self._catalogue.start(checkpoint_s=self.plan.checkpoint_s)
            self._queue = kvpool_native.SsdQueue(
                self._files, self._arena, self._index, self.plan.threads, self.plan.queue_jobs
            )
        except (lmdb.Error, OSError, RuntimeError, ValueError) as error:
            raise SsdUnavailable(f"{self.plan.path}: {error}") from error
        return Recovered(rows, namespaces, bad)

    def close(self) -> None:
        """End I/O and write the catalogue down. Blocks."""
        if self._queue is not None:
            self._queue.stop()
        if self._catalogue is not None:
            self._catalogue.close()

    def fileno(self) -> int:
        """The descriptor that is readable while outcomes wait; -1 before `open`."""
        return -1 if self._queue is None else self._queue.fileno()

    def take_outcomes(self) -> list[tuple[int, int, SsdStatus]]:
        """What has ended: job, chunk, status."""
        assert self._queue is not None
        outcomes = [(job, chunk, SsdStatus(status)) for job, chunk, status, _ in self._queue.take_outcomes()]
        for _, _, status in outcomes:
            self._note(status)
        return outcomes

    def read(self, rows: bytes, fingerprint: bytes, layers: int, layer_bytes: int, *, is_urgent: bool) -> int:
        """Start reading chunks into the arena; a job's number, 0 when nothing can be started."""
        if self._queue is None or not self.can_read:
            return 0
        return self._queue.read(rows, self.pool_epoch, fingerprint, layers, layer_bytes, 0 if is_urgent else 1)

    def write(self, rows: bytes, fingerprint: bytes, layers: int, layer_bytes: int) -> int:
        """Start writing chunks of the arena; a job's number, 0 when nothing can be started."""
        if self._queue is None or not self.can_write:
            return 0
        return self._queue.write(rows, self.pool_epoch, fingerprint, layers, layer_bytes, self._index_view)

    def remember(self, row: Row) -> None:
        """Have the catalogue know a chunk."""
        assert self._catalogue is not None
        self._catalogue.put(row)

    def forget(self, key: bytes) -> None:
        """Have the catalogue know a chunk no more."""
        if self._catalogue is not None:
            self._catalogue.delete(key)

    def remember_namespace(self, number: int, record: NamespaceRecord) -> None:
        """Have the catalogue know a namespace."""
        assert self._catalogue is not None
        self._catalogue.put_namespace(number, record)

    def next_recency(self) -> int:
        """A number greater than all before it."""
        self._recency += 1
        return self._recency

    def checkpoint(self, timeout_s: float) -> bool:
        """Have all that was written kept for certain. Blocks."""
        return self._catalogue is not None and self._catalogue.checkpoint(timeout_s)

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state, and say so once."""
        if state != self.state:
            log.log(logging.INFO if state == TierState.OK else logging.WARNING, "ssd tier %s %s", state.name, reason)
        self.state, self.state_reason = state, reason

    @property
    def can_be_tried_again(self) -> bool:
        """Whether the tier was open once and rests because of errors."""
        return self._queue is not None and self.state in (TierState.READONLY, TierState.OFFLINE)

    def try_again(self) -> None:
        """Take the tier as usable: what goes wrong now puts it to rest again."""
        if self._catalogue is not None and self._catalogue.failure is not None:
            self._catalogue.resume(checkpoint_s=self.plan.checkpoint_s)
        self.become(TierState.OK, "is tried again")

    def stats(self) -> dict[str, int | str]:
        """Counters, by name."""
        queue = self._queue.stats() if self._queue is not None else {}
        return {
            "ssd.state": self.state.name.lower(),
            "ssd.read_bytes": queue.get("read_bytes", 0),
            "ssd.written_bytes": queue.get("written_bytes", 0),
            "ssd.io_errors": self.io_errors,
            "ssd.corrupt_chunks": self.corrupt_chunks,
            "ssd.waiting_reads": queue.get("waiting_demand", 0) + queue.get("waiting_promotion", 0),
            "ssd.waiting_writes": queue.get("waiting_write_back", 0),
            "ssd.catalogue_waiting": self._catalogue.waiting if self._catalogue is not None else 0,
            "ssd.catalogue_dropped": self._catalogue.dropped_rows if self._catalogue is not None else 0,
        }

    def _open_files(self, catalogue_path: Path) -> kvpool_native.SsdFiles:
        plan = self.plan
        arguments = (str(plan.path), plan.segment_bytes, plan.segments, plan.is_direct)
        try:
            return kvpool_native.SsdFiles.open(*arguments)
        except FileExistsError as error:
            # Other sizes than configured: an earlier configuration's. What they hold cannot be placed in these.
            log.warning("the ssd tier begins anew: %s", error)
            shutil.rmtree(catalogue_path, ignore_errors=True)
            _remove_segments(plan.path)
            self.pool_epoch = new_epoch()
            return kvpool_native.SsdFiles.open(*arguments)

    def _note(self, status: SsdStatus) -> None:
        if status == SsdStatus.IO_ERROR:
            self.io_errors += 1
            self._read_errors += 1
            self.become(
                TierState.OFFLINE if self._read_errors >= ERRORS_UNTIL_OFFLINE else TierState.READONLY,
                "after I/O errors",
            )
        elif status.is_corruption:
            self.corrupt_chunks += 1
        elif status == SsdStatus.OK:
            self._read_errors = 0


def _remove_segments(path: Path, *, first: int = 0) -> None:
    """Remove the segment files from number `first` on: those of a larger capacity, or all."""
    for file in path.glob("segment-[0-9][0-9][0-9][0-9][0-9][0-9].kvs*"):
        number = int(file.name.removeprefix("segment-").partition(".")[0])
        if number >= first and file.is_file() and not file.is_symlink() and file.stat().st_uid == os.geteuid():
            file.unlink()
