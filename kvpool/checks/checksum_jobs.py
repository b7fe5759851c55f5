"""Chunks of a tier beside the arena that are being compared with their checksums where they lie.

Each has a pin until its read has ended, even if the requester is gone; a bad one is dropped there, in the generation that was
read, with its descendants. A check does not count as a use. Control thread only; no I/O.

Invariant: each chunk under way has one pin in the tier's directory.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from kvpool.ids import HoldId, NamespaceId
from kvpool.index.namespaces import Namespaces
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import Finished, Moves, Outcome, Stocked
from kvpool.tiers.jobs import Jobs


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk to be compared: its pin, and where it lies in the tier."""

    key: bytes
    pin: HoldId
    offset: int
    generation: int
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class ChecksumResult:
    """Result of a comparison. `fault`: empty for a good chunk, else the reason; `dropped`: chunks dropped because of it."""

    key: bytes
    fault: str
    dropped: int = 0


class ChecksumJobs:
    """All comparisons under way in one tier. `corrupt_chunks`: those that were bad."""

    def __init__(self, tier: Stocked, namespaces: Namespaces, jobs: Jobs, bad_chunk_log: BadChunkLog) -> None:
        self.tier = tier
        self._namespaces = namespaces
        self._jobs = jobs
        self._bad_chunk_log = bad_chunk_log
        self.pins = 0  # in the tier's directory
        self.corrupt_chunks = 0

    def __repr__(self) -> str:
        return f"<ChecksumJobs {self.pins} chunks>"

    def start(self, chunk: Stored) -> "asyncio.Future[ChecksumResult] | None":
        """Compare a chunk. None when the tier cannot be read now. The pin ends in any case."""
        directory = self.tier.slots.directory
        slot = int.from_bytes(directory.columns([chunk.pin]).slots, "little")
        moves = Moves([chunk.key], [b""], [chunk.offset], [chunk.generation], [0], [slot])
        job_id = self.tier.check(self._namespaces.by_id(chunk.namespace), moves)
        if not job_id:
            directory.unpin(chunk.pin)
            return None
        waiting: asyncio.Future[ChecksumResult] = asyncio.get_running_loop().create_future()
        self._jobs.add_job(job_id, 1, partial(self._settle, chunk, waiting))
        self.pins += 1
        return waiting

    def _settle(self, chunk: Stored, waiting: "asyncio.Future[ChecksumResult]", finished: Finished) -> None:
        """A chunk has been read or not. That is no use of it."""
        dropped, directory, key = 0, self.tier.slots.directory, chunk.key
        is_good = finished.outcome is Outcome.DONE
        fault = "" if is_good else finished.fault or finished.outcome.name.lower()
        if finished.outcome is Outcome.BAD_SOURCE:
            dropped = directory.drop(key, chunk.generation)
            self.corrupt_chunks += dropped > 0
            self._bad_chunk_log.note_bad_chunk(key, fault, self.tier.slots.place_of(chunk.offset))
        directory.unpin(chunk.pin)
        self.pins -= 1
        if not waiting.done():
            waiting.set_result(ChecksumResult(key, fault, dropped))
