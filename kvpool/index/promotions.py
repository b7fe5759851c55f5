"""Promotion: chunks of a slower tier on their way back into DRAM, for a request that wants them.

A lease covers the longest prefix that the two tiers hold together. What only the slower one has gets slots in DRAM and is
read into them; it can be acquired by anybody at once and loaded layer by layer as it lands.

    RESERVED ──read──► LANDED
        └──failed──► dropped, with what follows it; what is bad on disk is forgotten there too

Control thread only; no I/O. Invariant: each job in `_jobs` has one hold in each tier's directory, and gives both back
when the last of its chunks has been reported.
"""

import logging
from dataclasses import dataclass

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.index.slower import SlowerTier, pack_moves
from kvpool.types import KEY_BYTES, HoldId, SaveState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    hold: HoldId
    hold_below: HoldId
    keys: list[bytes]
    generations: list[int]
    left: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What the tiers hold of one rank's keys: chunks and a hold in DRAM, chunks and a hold below."""

    keys: bytes
    chunks: int
    hold: HoldId
    chunks_below: int
    hold_below: HoldId


class Promotions:
    """All promotions under way."""

    def __init__(self, directory: kvpool_native.Directory, slower: SlowerTier) -> None:
        self._directory = directory
        self._slower = slower
        self._jobs: dict[int, _Job] = {}
        self.failed_chunks = 0

    def __repr__(self) -> str:
        return f"<Promotions {len(self._jobs)} jobs>"

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def holds(self) -> int:
        """Holds that promotions have in the DRAM directory; as many in the one below."""
        return len(self._jobs)

    def acquire(
        self, session: EngineSession, keys: bytes, now_ns: int, *, is_urgent: bool = True
    ) -> tuple[int, list[int], bool]:
        """(chunks, a DRAM hold for each rank, whether it is all) of the longest prefix that both tiers hold together.

        Not all: DRAM has no room for the rest just now. What is not urgent is read behind all that is.
        """
        ranks = list(session.namespaces.values())
        length = len(keys) // len(ranks)
        found = [self._find(entry, keys[rank * length : (rank + 1) * length]) for rank, entry in enumerate(ranks)]
        reach = min(max(entry.chunks, entry.chunks_below) for entry in found)
        chunks = reach
        for namespace, entry in zip(ranks, found, strict=True):
            chunks = min(chunks, self._promote(namespace, entry, reach, now_ns, is_urgent=is_urgent))
        if all(entry.chunks == chunks for entry in found):
            return chunks, [int(entry.hold) for entry in found], chunks == reach
        holds = [0] * len(ranks)
        if chunks:
            taken = [
                self._directory.acquire(namespace.id, entry.keys[: chunks * KEY_BYTES])
                for namespace, entry in zip(ranks, found, strict=True)
            ]
            assert all(count == chunks for count, _ in taken)
            holds = [hold for _, hold in taken]
        for entry in found:
            if entry.hold:
                self._directory.release(entry.hold, now_ns)
        return chunks, holds, chunks == reach

    def settle(self, job_id: int, chunk: int, *, is_good: bool, is_bad_below: bool, tokens: bytes, now_ns: int) -> bool:
        """A chunk has landed, with its token ids where they are known, or failed. False when the job is none of these."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        failpoint.reach("daemon.promote.landed")
        key, generation = job.keys[chunk], job.generations[chunk]
        if is_good:
            self._directory.landed(key, generation, tokens)
            self._slower.touch(key)
        else:
            self.failed_chunks += 1
            self._directory.fail_landing(key, generation)
        if is_bad_below:
            log.error("chunk %s is bad in the slower tier: dropped there", key.hex()[:16])
            self._slower.directory.drop(key)
        job.left -= 1
        if not job.left:
            del self._jobs[job_id]
            self._directory.release(job.hold, now_ns)
            self._slower.directory.release(job.hold_below, now_ns)
        return True

    def _find(self, namespace: Namespace, keys: bytes) -> _Found:
        chunks, hold = self._directory.acquire(namespace.id, keys)
        chunks_below, hold_below = 0, 0
        if self._slower.can_read and chunks * KEY_BYTES < len(keys):
            chunks_below, hold_below = self._slower.directory.acquire(namespace.id, keys)
            if chunks_below > chunks:
                failpoint.reach("daemon.promote.held")
        return _Found(keys, chunks, HoldId(hold), chunks_below, HoldId(hold_below))

    def _promote(self, namespace: Namespace, found: _Found, reach: int, now_ns: int, *, is_urgent: bool) -> int:
        """Have chunks up to `reach` read; how many are in DRAM or on their way. The hold below is given back or used."""
        chunks = found.chunks
        is_under_way = False
        if reach > chunks:
            wanted = found.keys[chunks * KEY_BYTES : reach * KEY_BYTES]
            parent = found.keys[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES] if chunks else b""
            hold, states, offsets, generations = self._directory.promote(
                namespace.id, namespace.size_class, parent, wanted, now_ns
            )
            placed = _leading(states)
            reserved = [number for number in range(placed) if states[number] == SaveState.RESERVED]
            if reserved:
                is_under_way = self._read(
                    namespace, found, reserved, HoldId(hold), offsets, generations, is_urgent=is_urgent
                )
                placed = placed if is_under_way else reserved[0]
            if hold and not is_under_way:
                self._directory.release(hold, now_ns)
            chunks += placed
        if found.hold_below and not is_under_way:
            self._slower.directory.release(found.hold_below, now_ns)
        return chunks

    def _read(
        self,
        namespace: Namespace,
        found: _Found,
        reserved: list[int],
        hold: HoldId,
        offsets: bytes,
        generations: bytes,
        *,
        is_urgent: bool,
    ) -> bool:
        """Start the reading of the reserved chunks. False when the tier takes no more: then they are given up."""
        below = self._slower.directory.columns(found.hold_below)
        places = np.frombuffer(below[0], "<u8")
        generations_below = np.frombuffer(below[1], "<u8")
        targets = np.frombuffer(offsets, "<u8")
        fresh = np.frombuffer(generations, "<u8")
        keys = [found.keys[(found.chunks + n) * KEY_BYTES : (found.chunks + n + 1) * KEY_BYTES] for n in reserved]
        rows = pack_moves(
            keys,
            [b""] * len(keys),
            [int(places[found.chunks + n]) for n in reserved],
            [int(targets[n]) for n in reserved],
            [int(generations_below[found.chunks + n]) for n in reserved],
        )
        job_id = self._slower.read(namespace, rows, is_urgent=is_urgent)
        kept = [int(fresh[n]) for n in reserved]
        if not job_id:
            for key, generation in zip(keys, kept, strict=True):
                self._directory.fail_landing(key, generation)
            return False
        self._jobs[job_id] = _Job(hold, found.hold_below, keys, kept, len(keys))
        return True


def _leading(states: bytes) -> int:
    """How many leading chunks have a slot."""
    count = 0
    while count < len(states) and states[count] in (SaveState.PRESENT, SaveState.RESERVED):
        count += 1
    return count
