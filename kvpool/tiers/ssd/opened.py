"""Open SSD tier: its files, I/O queue and catalogue, and the null object that replaces them while it is not open.

`OpenSsd` exists from the moment when everything is usable until the daemon ends, whatever the disk does meanwhile. Before that
`ClosedSsd` takes its place: it starts no job and stores nothing. The tier (`tier.py`) interprets errors.

Control thread only, except `checkpoint`, `note_flushed` and `close`, which block and belong in an executor.
"""

import logging
import os
from collections.abc import Sequence

import kvpool_native
from kvpool.clock import NS_PER_S, Stopwatch
from kvpool.tiers.base import NOT_STARTED, ArenaMemory, Counters, JobId, Moves
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import NamespaceRecord
from kvpool.tiers.ssd.catalogue.rows import Row, Touch
from kvpool.tiers.ssd.faults import text_of
from kvpool.tiers.ssd.flushed import FlushFloors
from kvpool.tiers.ssd.place import SsdPlace, probe_disk
from kvpool.tiers.ssd.plan import OUTCOMES_AT_ONCE, SsdPlan
from kvpool.tiers.ssd.status import SsdStatus

log = logging.getLogger(__name__)

# How long `close` waits for the disk, once for the segment files and once for the catalogue.
CLOSE_TIMEOUT_S = 10.0
NO_DESCRIPTOR = -1

# The geometry of all chunks of a job: the namespace's fingerprint, extents, bytes of an extent.
Geometry = tuple[bytes, int, int]
# A chunk that has ended: job, chunk, status and token ids (i32).
Ended = tuple[JobId, int, SsdStatus, bytes]


class ClosedSsd:
    """Null object: the tier is not open."""

    is_open = False
    may_write = False
    backend = "none"
    unanswered_s = 0.0
    waits: tuple[tuple[str, float], ...] = ()
    flush_failure = ""
    is_distrusted = False
    has_failed_catalogue = False
    failure = ""
    fault = ""
    checkpoints = 0
    fileno = NO_DESCRIPTOR

    def read(self, moves: Moves, geometry: Geometry, *, is_urgent: bool) -> JobId:  # noqa: ARG002
        """Nothing is started."""
        return NOT_STARTED

    def write(self, moves: Moves, geometry: Geometry) -> JobId:  # noqa: ARG002
        """Nothing is started."""
        return NOT_STARTED

    def check(self, moves: Moves, geometry: Geometry) -> JobId:  # noqa: ARG002
        """Nothing is started."""
        return NOT_STARTED

    def completed(self) -> list[Ended]:
        """Nothing has ended."""
        return []

    def remember(self, row: Row) -> None:
        """Nothing is stored."""

    def touch(self, key: bytes, touch: Touch) -> None:
        """Nothing is stored."""

    def forget(self, key: bytes) -> None:
        """There are no rows."""

    def remember_namespace(self, number: int, record: NamespaceRecord) -> None:
        """There are no rows."""

    def forget_namespace(self, number: int) -> None:
        """There are no rows."""

    def note_flushed(self, fingerprints: Sequence[bytes] | None, generation: int | None) -> bool:  # noqa: ARG002
        """Nothing is stored: what is on the disk comes back."""
        return False

    def settle_flushed(self) -> None:
        """There are no rows."""

    def take_lost(self) -> list[tuple[bytes, int]]:
        """Nothing was written."""
        return []

    def probe(self, offset: int | None) -> str:  # noqa: ARG002
        """Nothing is there."""
        return ""

    def resume(self) -> None:
        """There is nothing to resume."""

    def checkpoint(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nothing was written, so all of it is certain."""
        return True

    def stats(self) -> Counters:
        """Counters, by name: zeros."""
        return _counters({}, waiting=0, checkpoints=0, dropped=0, lost=0)

    def died(self) -> list[str]:
        """There are no threads."""
        return []

    def close(self) -> bool:
        """Nothing is left."""
        return True


class OpenSsd:
    """Files, queue and catalogue of one tier. `epoch`: of its segment files."""

    is_open = True

    def __init__(
        self,
        plan: SsdPlan,
        memory: ArenaMemory,
        *,
        files: kvpool_native.SsdFiles,
        place: SsdPlace,
        catalogue: Catalogue,
        floors: FlushFloors,
        epoch: bytes,
    ) -> None:
        self._plan = plan
        self._files = files
        self._place = place
        self._catalogue = catalogue
        self._floors = floors
        self._epoch = epoch
        self._flushing, self._probing = Stopwatch(), Stopwatch()
        self._index_view = kvpool_native.IndexView(memory.index)
        wants_rings = plan.io == "io_uring" or (plan.io == "auto" and files.is_direct)
        self._queue = kvpool_native.SsdQueue(
            files, memory.arena, memory.index, plan.threads, plan.queue_jobs, wants_rings
        )
        error = self._queue.io()["ring_error"]
        if error:
            level = logging.WARNING if plan.io == "io_uring" else logging.INFO
            log.log(level, "the ssd tier does without io_uring: %s", os.strerror(error))

    def __repr__(self) -> str:
        return f"<OpenSsd {self._plan.path}, {self.backend}>"

    @property
    def backend(self) -> str:
        """The I/O backend, for operators."""
        io = self._queue.io()
        is_by_rings = io["rings"] and not io["is_distrusted"]
        words = ["io_uring" if is_by_rings else "threads", "direct" if self._files.is_direct else "page cache"]
        if io["is_distrusted"]:
            words.append("all writes read back (what was moved differed once)")
        return ", ".join(words) + (f" (no io_uring: {os.strerror(io['ring_error'])})" if io["ring_error"] else "")

    @property
    def fileno(self) -> int:
        """The descriptor that is readable while chunks have ended."""
        return self._queue.fileno()

    @property
    def unanswered_s(self) -> float:
        """How long the oldest I/O has been without an answer; 0 where none is under way."""
        return self._queue.longest_transfer_ns() / NS_PER_S

    @property
    def waits(self) -> tuple[tuple[str, float], ...]:
        """What else waits for the disk, and seconds so far."""
        waiting = (("the catalogue", self._catalogue.busy), ("a flush", self._flushing), ("a probe", self._probing))
        return tuple((what, watch.elapsed_s) for what, watch in waiting)

    @property
    def flush_failure(self) -> str:
        """Why the last flush is not durable; empty where it is."""
        return self._floors.failure

    @property
    def is_distrusted(self) -> bool:
        """Whether bytes have changed on their way once: I/O is by plain calls since then, and reads back what it writes."""
        return bool(self._queue.io()["is_distrusted"])

    @property
    def fault(self) -> str:
        """The latest failed I/O, with its error; empty where none has failed."""
        return text_of(self._queue, self._plan.segment_bytes)

    @property
    def checkpoints(self) -> int:
        """How many have succeeded."""
        return self._catalogue.checkpoints

    @property
    def may_write(self) -> bool:
        """Whether a restart knows which generations this process may give to slots: none is written before."""
        return self._catalogue.has_begun

    @property
    def has_failed_catalogue(self) -> bool:
        """Whether the catalogue, or a sync of the data, has failed and was not retried yet."""
        return self._catalogue.failure is not None

    @property
    def failure(self) -> str:
        """The reason of the catalogue's failure."""
        return str(self._catalogue.failure)

    def read(self, moves: Moves, geometry: Geometry, *, is_urgent: bool) -> JobId:
        """Start reading chunks into the arena."""
        return JobId(self._queue.read(moves.rows(), self._epoch, *geometry, self._index_view, 0 if is_urgent else 1))

    def write(self, moves: Moves, geometry: Geometry) -> JobId:
        """Start writing chunks of the arena."""
        return JobId(self._queue.write(moves.rows(), self._epoch, *geometry, self._index_view, moves.tokens))

    def check(self, moves: Moves, geometry: Geometry) -> JobId:
        """Start comparing chunks with their checksums, after all other jobs."""
        return JobId(self._queue.verify(moves.rows(), self._epoch, *geometry))

    def completed(self) -> list[Ended]:
        """Finished chunks, at most one turn's work."""
        taken = self._queue.take_outcomes(OUTCOMES_AT_ONCE)
        return [(JobId(one.job), one.chunk, SsdStatus(one.status), one.tokens) for one in taken]

    def remember(self, row: Row) -> None:
        """Queue a row of the catalogue."""
        self._catalogue.put(row)

    def touch(self, key: bytes, touch: Touch) -> None:
        """Queue a chunk's last use and retention for its row."""
        self._catalogue.touch(key, touch)

    def forget(self, key: bytes) -> None:
        """Queue the removal of a chunk's row."""
        self._catalogue.delete(key)

    def remember_namespace(self, number: int, record: NamespaceRecord) -> None:
        """Queue a namespace's record."""
        self._catalogue.put_namespace(number, record)

    def forget_namespace(self, number: int) -> None:
        """Queue the removal of the record of a namespace without chunks."""
        self._catalogue.delete_namespace(number)

    def note_flushed(self, fingerprints: Sequence[bytes] | None, generation: int | None) -> bool:
        """Record that an operator has dropped chunks; whether that is durable. Blocks; any thread."""
        with self._flushing.running():
            if generation is None:
                return self._catalogue.checkpoint(CLOSE_TIMEOUT_S)
            return self._floors.note(fingerprints, generation)

    def settle_flushed(self) -> None:
        """Queue the number of the last flush, behind its removals."""
        self._catalogue.put_flushes(self._floors.sequence)

    def take_lost(self) -> list[tuple[bytes, int]]:
        """Keys and generations of chunks that a failed sync may have lost; each is returned once."""
        return self._catalogue.take_lost()

    def probe(self, offset: int | None) -> str:
        """Why the disk cannot be used again, after a look at the place, a write, and a read at an offset over all files (None:
        none); empty where it can. Blocks; for an executor."""
        with self._probing.running():
            try:
                self._place.check()
            except OSError as error:
                return str(error)
            return probe_disk(self._plan, offset)

    def resume(self) -> None:
        """Use a catalogue again that has failed."""
        if self.has_failed_catalogue:
            self._catalogue.resume(checkpoint_s=self._plan.checkpoint_s)

    def checkpoint(self, timeout_s: float) -> bool:
        """Make everything that was written durable. Blocks."""
        return self._catalogue.checkpoint(timeout_s)

    def stats(self) -> Counters:
        """Counters, by name."""
        catalogue = self._catalogue
        return _counters(
            self._queue.stats(),
            waiting=catalogue.waiting,
            checkpoints=catalogue.checkpoints,
            dropped=catalogue.dropped_rows,
            lost=catalogue.lost_rows,
        )

    def died(self) -> list[str]:
        """Names of threads that have died. Any thread."""
        return ["catalogue"] if self._catalogue.has_died else []

    def close(self) -> bool:
        """End I/O and write the catalogue. Blocks, but not for ever: False where the disk did not answer in time.

        Then threads are left that wait for the disk; nobody may join them.
        """
        has_ended = self._queue.stop(CLOSE_TIMEOUT_S)
        if not has_ended:
            log.error("I/O of the ssd tier is left under way: the disk does not answer within %g s", CLOSE_TIMEOUT_S)
        has_floors = self._floors.write(CLOSE_TIMEOUT_S)
        if not has_floors:
            log.error(
                "a restart may bring back what was flushed: the file of flushes is not written within %g s",
                CLOSE_TIMEOUT_S,
            )
        return self._catalogue.close(CLOSE_TIMEOUT_S) and has_ended and has_floors


def _counters(queue: dict[str, int], *, waiting: int, checkpoints: int, dropped: int, lost: int) -> Counters:
    return {
        "ssd.read_bytes": queue.get("read_bytes", 0),
        "ssd.written_bytes": queue.get("written_bytes", 0),
        "ssd.read_back_chunks": queue.get("read_back_chunks", 0),
        "ssd.second_reads": queue.get("second_reads", 0),
        "ssd.waiting_reads": queue.get("waiting_demand", 0) + queue.get("waiting_promotion", 0),
        "ssd.waiting_writes": queue.get("waiting_write_back", 0),
        "ssd.waiting_checks": queue.get("waiting_check", 0),
        "ssd.waiting_rows": waiting,
        "ssd.checkpoints": checkpoints,
        "ssd.dropped_rows": dropped,
        "ssd.lost_rows": lost,
    }
