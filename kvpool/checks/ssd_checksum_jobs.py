"""SSD checksum jobs: chunks of the lower tier that are being compared with their checksums on disk.

Each has a pin until its read has ended, even if the requester is gone; a bad one is dropped there, in the generation that was
read, with its descendants. A check does not count as a use. Control thread only; no I/O.

Invariant: each job in `_jobs` has one pin in the lower tier's directory.
"""

import asyncio
import logging
from dataclasses import dataclass

from kvpool.index.namespaces import Namespaces
from kvpool.tiers.base import SlowerTier, pack_moves
from kvpool.types import HoldId, NamespaceId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChecksumResult:
    """Result of a comparison. `fault`: empty for a good chunk, else the reason; `dropped`: chunks dropped because of it."""

    key: bytes
    fault: str
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    key: bytes
    generation: int
    pin: HoldId
    waiting: "asyncio.Future[ChecksumResult]"


class SsdChecksumJobs:
    """All comparisons under way."""

    def __init__(self, slower: SlowerTier, namespaces: Namespaces) -> None:
        self.slower = slower
        self._namespaces = namespaces
        self._jobs: dict[int, _Job] = {}

    def __repr__(self) -> str:
        return f"<SsdChecksumJobs {len(self._jobs)} chunks>"

    @property
    def pins(self) -> int:
        """Pins in the lower tier's directory."""
        return len(self._jobs)

    def start(
        self, key: bytes, pin: HoldId, *, offset: int, generation: int, namespace: NamespaceId
    ) -> "asyncio.Future[ChecksumResult] | None":
        """Compare a chunk. None when the tier cannot be read now. The pin ends in any case."""
        rows = pack_moves([key], [b""], [offset], [0], [generation])
        job_id = self.slower.compare(self._namespaces.by_id(namespace), rows)
        if not job_id:
            self.slower.directory.unpin(pin)
            return None
        waiting: asyncio.Future[ChecksumResult] = asyncio.get_running_loop().create_future()
        self._jobs[job_id] = _Job(key, generation, pin, waiting)
        return waiting

    def settle(self, job_id: int, *, fault: str, is_bad: bool) -> bool:
        """Take the result of a job. False when the job is none of these."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return False
        dropped = 0
        if is_bad:
            dropped = self.slower.directory.drop(job.key, job.generation)
            log.error("chunk %s is bad in the lower tier (%s): %d chunks dropped", job.key.hex()[:16], fault, dropped)
        self.slower.directory.unpin(job.pin)
        if not job.waiting.done():
            job.waiting.set_result(ChecksumResult(job.key, fault, dropped))
        return True
