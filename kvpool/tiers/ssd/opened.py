"""Open SSD tier: its segment files and their I/O queue.

It exists from the moment when everything is usable until the daemon ends, whatever the disk does meanwhile. The tier
(`tier.py`) interprets errors. Control thread only, except `probe` and `close`, which block and belong in an executor.
"""

import logging
import os

import kvpool_native
from kvpool.clock import NS_PER_S, Stopwatch
from kvpool.tiers.base import ArenaMemory, Counters, JobId, Moves
from kvpool.tiers.ssd.faults import text_of
from kvpool.tiers.ssd.place import SsdPlace, probe_disk
from kvpool.tiers.ssd.plan import OUTCOMES_AT_ONCE, QUEUE_JOBS, SsdPlan
from kvpool.tiers.ssd.status import SsdStatus

log = logging.getLogger(__name__)

# How long a close waits for the disk, once for the segment files and once for the catalogue.
CLOSE_TIMEOUT_S = 10.0

# The geometry of all chunks of a job: the namespace's fingerprint, extents, bytes of an extent.
Geometry = tuple[bytes, int, int]
# A chunk that has ended: job, chunk, status and token ids (i32).
Ended = tuple[JobId, int, SsdStatus, bytes]


class OpenSsd:
    """See the module. `epoch`: of the segment files."""

    def __init__(
        self,
        plan: SsdPlan,
        memory: ArenaMemory,
        *,
        files: kvpool_native.SsdFiles,
        place: SsdPlace,
        epoch: bytes,
    ) -> None:
        self._plan = plan
        self._files = files
        self._place = place
        self._epoch = epoch
        self.probing = Stopwatch()
        self._index_view = kvpool_native.IndexView(memory.index)
        wants_rings = plan.config.io == "io_uring" or (plan.config.io == "auto" and files.is_direct)
        self._queue = kvpool_native.SsdQueue(
            files, memory.arena, memory.index, plan.config.threads, QUEUE_JOBS, wants_rings
        )
        error = self._queue.io()["ring_error"]
        if error:
            level = logging.WARNING if plan.config.io == "io_uring" else logging.INFO
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
    def is_distrusted(self) -> bool:
        """Whether bytes have changed on their way once: I/O is by plain calls since then, and reads back what it writes."""
        return bool(self._queue.io()["is_distrusted"])

    @property
    def fault(self) -> str:
        """The latest failed I/O, with its error; empty where none has failed."""
        return text_of(self._queue, self._plan.segment_bytes)

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

    def probe(self, offset: int | None) -> str:
        """Why the disk cannot be used again, after a look at the place, a write, and a read at an offset over all files (None:
        none); empty where it can. Blocks; for an executor."""
        with self.probing.running():
            try:
                self._place.check()
            except OSError as error:
                return str(error)
            return probe_disk(self._plan, offset)

    def close(self) -> bool:
        """End I/O. Blocks, but not for ever: False where the disk did not answer in time.

        Then threads are left that wait for the disk; nobody may join them.
        """
        has_ended = self._queue.stop(CLOSE_TIMEOUT_S)
        if not has_ended:
            log.error("I/O of the ssd tier is left under way: the disk does not answer within %g s", CLOSE_TIMEOUT_S)
        return has_ended

    @staticmethod
    def counters(disk: "OpenSsd | None") -> Counters:
        """Counters, by name: zeros where there is no disk yet."""
        queue = {} if disk is None else disk._queue.stats()
        return {
            "ssd.read_bytes": queue.get("read_bytes", 0),
            "ssd.written_bytes": queue.get("written_bytes", 0),
            "ssd.read_back_chunks": queue.get("read_back_chunks", 0),
            "ssd.second_reads": queue.get("second_reads", 0),
            "ssd.waiting_reads": queue.get("waiting_demand", 0) + queue.get("waiting_promotion", 0),
            "ssd.waiting_writes": queue.get("waiting_write_back", 0),
            "ssd.waiting_checks": queue.get("waiting_check", 0),
        }
