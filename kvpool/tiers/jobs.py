"""Jobs under way in one tier, by number, each with what settles its chunks. Control thread only.

Invariant: each chunk of a job is settled once, even if a tier reports it twice; the job ends after its last chunk.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.clock import Clock
from kvpool.tiers.base import Finished, JobId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    settle: Callable[[Finished], None]
    end: Callable[[int], None]
    is_waiting: bytearray  # for each chunk: the tier has not reported it yet
    left: int
    heard_ns: int  # time of the job's start, or of its last report


class Jobs:
    """See the module. `strays`: reports that belong to no job; a correct tier makes none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_id: dict[JobId, _Job] = {}
        self.strays = 0

    def __repr__(self) -> str:
        return f"<Jobs {len(self)} under way>"

    def __len__(self) -> int:
        return len(self._by_id)

    def add_job(
        self,
        number: JobId,
        chunks: int,
        settle: Callable[[Finished], None],
        end: Callable[[int], None] = lambda _: None,
    ) -> None:
        """A job of so many chunks has started. `settle` is called for each that has ended, then `end` with the time."""
        assert number not in self._by_id
        self._by_id[number] = _Job(settle, end, bytearray([1]) * chunks, chunks, self._clock.now_ns())

    def silence_ns(self) -> int:
        """How long the tier has reported nothing of a job under way: the longest such time."""
        now_ns = self._clock.now_ns()
        return now_ns - min((job.heard_ns for job in self._by_id.values()), default=now_ns)

    def settle_chunk(self, finished: Finished, now_ns: int) -> None:
        """A chunk has ended, and with its last one the job."""
        job = self._by_id.get(finished.job)
        if job is None or not 0 <= finished.chunk < len(job.is_waiting) or not job.is_waiting[finished.chunk]:
            self.strays += 1
            log.error("chunk %d of job %d has ended, and nobody waits for it", finished.chunk, finished.job)
            return
        job.is_waiting[finished.chunk] = 0
        job.left -= 1
        job.heard_ns = now_ns
        job.settle(finished)
        if not job.left:
            del self._by_id[finished.job]
            job.end(now_ns)
