"""The SSD tier: segment files, their slots, and what is known of them after a restart.

It owns the files, the I/O queue, the catalogue and the directory of slots; which chunk is worth writing or reading is
decided elsewhere. Nothing here stops the DRAM tier: what goes wrong changes the state and is a miss.

    STARTING ──files open, catalogue read──► OK ◄──tried again, later each time──┐
        └──cannot be opened──► OFFLINE       ├──I/O or the catalogue fails──► READONLY ──it fails on and on──► OFFLINE
                                             └──the disk does not answer──► OFFLINE

Control thread only, but for `open`, `probe` and `close`, which block and belong in an executor.
Invariant: files and catalogue together never take more than the capacity.
"""

import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S
from kvpool.errors import KVPoolError
from kvpool.tiers.ssd import flushed as ssd_flushed
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from kvpool.tiers.ssd.catalogue import rows as catalogue_rows
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import FILE_NAME as IDENTITY_NAME
from kvpool.tiers.ssd.catalogue.identity import Identity, NamespaceRecord, new_epoch, read_identity
from kvpool.tiers.ssd.catalogue.rows import Row, Touch
from kvpool.tiers.ssd.corruption import CorruptionGuard
from kvpool.tiers.ssd.directory import SsdUnavailable, check_directory
from kvpool.tiers.ssd.headers import SsdHeaders
from kvpool.tiers.ssd.plan import OUTCOMES_AT_ONCE, SsdPlan
from kvpool.tiers.ssd.rebuild import find_chunks
from kvpool.tiers.ssd.segments import (
    check_room,
    have_other_sizes,
    locked,
    open_segments,
    remove_misfits,
    remove_segments,
)
from kvpool.tiers.ssd.status import SsdStatus, TierState

log = logging.getLogger(__name__)

CATALOGUE_NAME = "catalogue"
ERRORS_UNTIL_OFFLINE = 8
# A disk that has left I/O unanswered for so long is not waited for when room is needed. A piece of a few MiB takes a disk
# that is well some milliseconds.
UNRESPONSIVE_S = 1.0
# How long the end waits for a disk, once for the segment files and once for the catalogue.
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier life left: rows in the order of restoring, and the namespaces their numbers mean.

    `generation`: the greatest that it may have given.
    """

    rows: "npt.NDArray[np.void]"
    namespaces: dict[int, NamespaceRecord]
    bad_rows: int
    generation: int


class SsdTier:
    """The tier of one daemon."""

    def __init__(self, plan: SsdPlan, arena: kvpool_native.Mapping, index: kvpool_native.Mapping) -> None:
        self.plan = plan
        self._arena = arena
        self._index = index
        self._index_view = kvpool_native.IndexView(index)
        geometry = kvpool_native.DirectoryGeometry.plan_files(plan.segment_bytes, plan.segments, plan.max_chunks)
        self.directory = kvpool_native.Directory.of_files(geometry)
        for segment in range(plan.segments):
            self.directory.mark_segment_ready(segment)
        self.state = TierState.STARTING
        self.state_reason = ""
        self.disk_warning = ""
        self.pool_epoch = b""
        self.headers = SsdHeaders(plan)
        self.io_errors = 0
        self.corrupt_chunks = 0
        self.corruption = CorruptionGuard()
        self.bad_writes = 0
        self._files: kvpool_native.SsdFiles | None = None
        self._queue: kvpool_native.SsdQueue | None = None
        self._catalogue: Catalogue | None = None
        self._recency = 1
        self._read_errors = 0
        self._is_stopping = threading.Event()
        self._is_distrusted = False

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
        if self._files is None or self._queue is None:
            return "none"
        io = self._queue.io()
        is_by_rings = io["rings"] and not io["is_distrusted"]
        words = ["io_uring" if is_by_rings else "threads", "direct" if self._files.is_direct else "page cache"]
        if io["is_distrusted"]:
            words.append("all writes read back (what was moved differed once)")
        return ", ".join(words) + (f" (no io_uring: {os.strerror(io['ring_error'])})" if io["ring_error"] else "")

    def open(self) -> Recovered:
        """Open or make everything, and read what an earlier life left. Raises SsdUnavailable. Blocks."""
        try:
            self.disk_warning = check_directory(self.plan.path, is_made=self.plan.is_made)
            return self._open()
        except (OSError, RuntimeError, ValueError, KVPoolError, lmdb.Error) as error:
            self.close()
            self._files = self._queue = self._catalogue = None
            raise SsdUnavailable(f"{self.plan.path}: {error}") from error

    def _open(self) -> Recovered:
        plan = self.plan
        catalogue_path = plan.path / CATALOGUE_NAME
        with locked(plan.path):
            check_room(plan)
            found, identity = self._look(catalogue_path)
        self._files = open_segments(plan)
        self.pool_epoch = self.headers.epoch = identity.epoch
        packed = found.rows if found and not plan.wants_rebuild else b""
        rows, bad = catalogue_rows.restorable(packed)
        is_rebuilt = identity.namespaces != {} and (found is None or plan.wants_rebuild)
        if is_rebuilt:
            rows = self._rebuild(identity, catalogue_path)
        last = found.generations_end if found else ssd_flushed.highest_floor(plan.path)
        generation = max(last, int(rows["generation"].max()) if len(rows) else 0)
        self.corruption.begin(generation)
        failpoint.reach("daemon.ssd.open_catalogue")
        try:
            self._catalogue = Catalogue(
                catalogue_path,
                plan.catalogue_bytes,
                identity,
                sync_data=self._files.sync,
                generations_end=generation + catalogue_open.GENERATIONS_OF_A_LIFE,
            )
        except catalogue_open.DAMAGE as error:
            log.error("catalogue %s is set aside, its rows are looked for in the slots: %s", catalogue_path, error)
            catalogue_open.set_aside(catalogue_path, plan.catalogue_bytes)
            raise  # the next try finds none
        if is_rebuilt:
            self._catalogue.fill(rows)
        self._recency = int(rows["recency"].max()) + 1 if len(rows) else 1
        self._catalogue.start(checkpoint_s=plan.checkpoint_s)
        self._queue = self._start_queue(self._files)
        return Recovered(rows, identity.namespaces, bad, generation)

    def _look(self, catalogue_path: Path) -> tuple[catalogue_open.Found | None, Identity]:
        """What an earlier life left, after everything that cannot be used has been removed."""
        plan = self.plan
        failpoint.reach("daemon.ssd.look")
        if have_other_sizes(plan):
            log.warning("the ssd tier begins anew: its files are of another ssd.segment or ssd.capacity")
            _forget_everything(plan.path)
        found = catalogue_open.examine(catalogue_path, plan.catalogue_bytes, self._is_stopping.is_set).found
        identity = Identity(found.epoch, found.namespaces) if found else read_identity(plan.path)
        if identity is None:
            _forget_everything(plan.path)
            identity = Identity(new_epoch(), {})
        failpoint.reach("daemon.ssd.open_files")
        remove_misfits(plan)
        return found, identity

    def _rebuild(self, identity: Identity, catalogue_path: Path) -> "npt.NDArray[np.void]":
        """Find chunks by the headers of their slots, because the catalogue is lost or not wanted."""
        if catalogue_path.exists():
            catalogue_open.set_aside(catalogue_path, self.plan.catalogue_bytes)
        found = find_chunks(self.plan.path, self.plan.segments, self.plan.segment_bytes, identity, self._is_stopping)
        return catalogue_rows.restorable(found)[0]

    def stop_opening(self) -> None:
        """Have an `open` under way in another thread give up soon."""
        self._is_stopping.set()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop_opening` was called."""
        return self._is_stopping.is_set()

    def close(self) -> bool:
        """End I/O and write the catalogue down. Blocks, but never for good: False where the disk did not answer in time.

        Then threads are left waiting for it, which whoever waits for them would do too.
        """
        has_ended = True
        self.headers.close()
        if self._queue is not None and not self._queue.stop(CLOSE_TIMEOUT_S):
            log.error("I/O of the ssd tier is left under way: the disk does not answer within %g s", CLOSE_TIMEOUT_S)
            has_ended = False
        if self._catalogue is not None:
            has_ended = self._catalogue.close(CLOSE_TIMEOUT_S) and has_ended
        return has_ended

    def fileno(self) -> int:
        """The descriptor that is readable while outcomes wait; -1 before `open`."""
        return -1 if self._queue is None else self._queue.fileno()

    def take_outcomes(self) -> list[tuple[int, int, SsdStatus, bytes]]:
        """What has ended, a turn's worth: job, chunk, status, and the token ids (i32) that came with a chunk that was read."""
        assert self._queue is not None
        taken = self._queue.take_outcomes(OUTCOMES_AT_ONCE)
        outcomes = [(each.job, each.chunk, SsdStatus(each.status), each.tokens) for each in taken]
        for _, _, status, _ in outcomes:
            self._note(status)
        if not self._is_distrusted and self._queue.io()["is_distrusted"]:
            self._is_distrusted = True
            log.error(
                "%s: what was read or written differed from what it was a moment before: plain calls alone from now on, and "
                "everything that is written is read back",
                self.plan.path,
            )
        return outcomes

    def read(self, rows: bytes, fingerprint: bytes, layers: int, layer_bytes: int, *, is_urgent: bool) -> int:
        """Start reading chunks into the arena; a job's number, 0 when nothing can be started."""
        if self._queue is None or not self.can_read:
            return 0
        return self._queue.read(rows, self.pool_epoch, fingerprint, layers, layer_bytes, 0 if is_urgent else 1)

    def write(self, rows: bytes, fingerprint: bytes, layers: int, layer_bytes: int, tokens: list[bytes]) -> int:
        """Start writing chunks of the arena; a job's number, 0 when nothing can be started."""
        if self._queue is None or not self.can_write:
            return 0
        return self._queue.write(rows, self.pool_epoch, fingerprint, layers, layer_bytes, self._index_view, tokens)

    def compare(self, rows: bytes, fingerprint: bytes, layers: int, layer_bytes: int) -> int:
        """Start comparing chunks with their checksums, behind all else; a job's number, 0 when nothing can be started."""
        if self._queue is None or not self.can_read:
            return 0
        return self._queue.verify(rows, self.pool_epoch, fingerprint, layers, layer_bytes)

    def remember(self, row: Row) -> None:
        """Have the catalogue know a chunk."""
        assert self._catalogue is not None
        self._catalogue.put(row)

    def touch(self, key: bytes, priority: int, duration_s: int) -> None:
        """Have the catalogue know that a chunk was used now, and with what it is kept."""
        if self._catalogue is not None:
            self._catalogue.touch(key, Touch(self.next_recency(), priority, duration_s))

    def take_lost(self) -> list[tuple[bytes, int]]:
        """Keys and generations of chunks that a failure to make them certain has put in doubt, once."""
        return self._catalogue.take_lost() if self._catalogue is not None else []

    def forget(self, key: bytes) -> None:
        """Have the catalogue know a chunk no more."""
        if self._catalogue is not None:
            self._catalogue.delete(key)

    def remember_namespace(self, number: int, record: NamespaceRecord) -> None:
        """Have the catalogue know a namespace."""
        assert self._catalogue is not None
        self._catalogue.put_namespace(number, record)

    def forget_namespace(self, number: int) -> None:
        """Have the catalogue know a namespace without chunks no more."""
        if self._catalogue is not None:
            self._catalogue.delete_namespace(number)

    def next_recency(self) -> int:
        """A number greater than all before it."""
        self._recency += 1
        return self._recency

    def checkpoint(self, timeout_s: float) -> bool:
        """Have all that was written kept for certain; where the tier never opened that is nothing. Blocks."""
        return self._catalogue is None or self._catalogue.checkpoint(timeout_s)

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state, and say so once."""
        if state != self.state:
            log.log(logging.INFO if state == TierState.OK else logging.WARNING, "ssd tier %s %s", state.name, reason)
        self.state, self.state_reason = state, reason

    @property
    def has_failed_catalogue(self) -> bool:
        """Whether the catalogue, or a sync of the data, has failed and was not tried again yet."""
        return self._catalogue is not None and self._catalogue.failure is not None

    def problems(self) -> list[str]:
        """Threads that have died, and a disk that changes bytes, one line each. Any thread."""
        owners = {"catalogue": self._catalogue, "headers": self.headers}
        died = [f"ssd: the thread of the {name} has died" for name, one in owners.items() if one and one.has_died]
        return died + self.corruption.problems()

    @property
    def can_be_tried_again(self) -> bool:
        """Whether the tier was open once and rests because of errors."""
        return self._queue is not None and self.state in (TierState.READONLY, TierState.OFFLINE)

    def try_again(self) -> None:
        """Take the tier as usable: what goes wrong now puts it to rest again."""
        if self._catalogue is not None and self._catalogue.failure is not None:
            self._catalogue.resume(checkpoint_s=self.plan.checkpoint_s)
        self.corruption.end_rest()
        self.become(TierState.OK, "is tried again")

    @property
    def unanswered_s(self) -> float:
        """For how long the disk has left I/O unanswered; 0 where there is none."""
        return 0.0 if self._queue is None else self._queue.longest_transfer_ns() / NS_PER_S

    @property
    def is_answering(self) -> bool:
        """Whether there is a point in waiting for the disk."""
        return self.unanswered_s < UNRESPONSIVE_S

    @property
    def has_stalled(self) -> bool:
        """Whether the disk of a tier in use has left I/O unanswered for `stall_s` of the plan."""
        return self.unanswered_s >= self.plan.stall_s and self.state in (TierState.OK, TierState.READONLY)

    def rest_stalled(self) -> None:
        """Stop using a disk that does not answer."""
        self.become(TierState.OFFLINE, f"because the disk has left I/O unanswered for {self.unanswered_s:.1f} s")

    def stats(self) -> dict[str, int | float | str]:
        """Counters, by name."""
        queue = self._queue.stats() if self._queue is not None else {}
        return {
            "ssd.state": self.state.name.lower(),
            "ssd.reason": self.state_reason,
            "ssd.read_bytes": queue.get("read_bytes", 0),
            "ssd.written_bytes": queue.get("written_bytes", 0),
            "ssd.io_errors": self.io_errors,
            "ssd.unanswered_s": round(self.unanswered_s, 3),
            "ssd.corrupt_chunks": self.corrupt_chunks,
            "ssd.read_back_chunks": queue.get("read_back_chunks", 0),
            "ssd.second_reads": queue.get("second_reads", 0),
            "ssd.bad_writes": self.bad_writes,
            "ssd.io_distrusted": int(self._is_distrusted),
            "ssd.waiting_reads": queue.get("waiting_demand", 0) + queue.get("waiting_promotion", 0),
            "ssd.waiting_writes": queue.get("waiting_write_back", 0),
            "ssd.waiting_checks": queue.get("waiting_check", 0),
            "ssd.catalogue_waiting": self._catalogue.waiting if self._catalogue is not None else 0,
            "ssd.checkpoints": self._catalogue.checkpoints if self._catalogue is not None else 0,
            "ssd.catalogue_dropped": self._catalogue.dropped_rows if self._catalogue is not None else 0,
        }

    def _start_queue(self, files: kvpool_native.SsdFiles) -> kvpool_native.SsdQueue:
        plan = self.plan
        wants_rings = plan.io == "io_uring" or (plan.io == "auto" and files.is_direct)
        queue = kvpool_native.SsdQueue(files, self._arena, self._index, plan.threads, plan.queue_jobs, wants_rings)
        self._queue = queue
        error = queue.io()["ring_error"]
        if error:
            level = logging.WARNING if plan.io == "io_uring" else logging.INFO
            log.log(level, "the ssd tier does without io_uring: %s", os.strerror(error))
        return queue

    def _note(self, status: SsdStatus) -> None:
        if status in (SsdStatus.IO_ERROR, SsdStatus.BAD_WRITE):
            self.io_errors += status == SsdStatus.IO_ERROR
            self.bad_writes += status == SsdStatus.BAD_WRITE
            self._read_errors += 1
            self.become(
                TierState.OFFLINE if self._read_errors >= ERRORS_UNTIL_OFFLINE else TierState.READONLY,
                "after I/O errors" if status == SsdStatus.IO_ERROR else "because a write was read back otherwise",
            )
        elif status.is_corruption:
            self.corrupt_chunks += 1
        elif status == SsdStatus.OK:
            self._read_errors = 0


def _forget_everything(path: Path) -> None:
    shutil.rmtree(path / CATALOGUE_NAME, ignore_errors=True)
    for name in (IDENTITY_NAME, ssd_flushed.FILE_NAME):
        (path / name).unlink(missing_ok=True)
    remove_segments(path)
