"""Jobs under way in one backing tier, by number, each with the owner that settles its chunks. Control thread only.

Invariant: each chunk of a job is settled once, even if a tier reports it twice; the job ends after its last chunk.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

from kvpool.clock import Clock
from kvpool.tiers.base import Finished, JobId

log = logging.getLogger(__name__)


class Job(Protocol):
    """A job as its owner knows it: a promotion, a demotion or a check of some chunks."""

    def settle(self, finished: Finished) -> None:
        """A chunk has ended."""

    def end(self, now_ns: int) -> None:
        """The last chunk has been settled."""


@dataclass(slots=True)
class _Entry:
    job: Job
    is_waiting: bytearray  # for each chunk: the tier has not reported it yet
    left: int
    heard_ns: int  # time of the job's start, or of its last report


class Jobs:
    """See the module. `strays`: reports that belong to no job; a correct tier makes none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_id: dict[JobId, _Entry] = {}
        self.strays = 0

    def __repr__(self) -> str:
        return f"<Jobs {len(self)} under way>"

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, number: JobId, job: Job, chunks: int) -> None:
        """A job of so many chunks has started."""
        assert number not in self._by_id
        self._by_id[number] = _Entry(job, bytearray([1]) * chunks, chunks, self._clock.now_ns())

    def silence_ns(self) -> int:
        """How long the tier has reported nothing of a job under way: the longest such time."""
        now_ns = self._clock.now_ns()
        return now_ns - min((entry.heard_ns for entry in self._by_id.values()), default=now_ns)

    def all(self) -> list[Job]:
        """Every job under way."""
        return [entry.job for entry in self._by_id.values()]

    def settle(self, finished: Finished, now_ns: int) -> None:
        """A chunk has ended: its owner settles it, and the job with its last one."""
        entry = self._by_id.get(finished.job)
        if entry is None or not 0 <= finished.chunk < len(entry.is_waiting) or not entry.is_waiting[finished.chunk]:
            self.strays += 1
            log.error("chunk %d of job %d has ended, and nobody waits for it", finished.chunk, finished.job)
            return
        entry.is_waiting[finished.chunk] = 0
        entry.left -= 1
        entry.heard_ns = now_ns
        entry.job.settle(finished)
        if not entry.left:
            del self._by_id[finished.job]
            entry.job.end(now_ns)
