"""Promotion: chunks of a slower tier on their way back into DRAM, for a request that wants them.

A lease covers the longest prefix that the two tiers hold together (`acquire_task`). What only the slower one has gets slots in
DRAM and is read into them; it can be acquired by anybody at once and loaded layer by layer as it lands.

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
from kvpool.tiers.base import SlowerTier, pack_moves
from kvpool.types import KEY_BYTES, HoldId, LoadFault, SaveState

log = logging.getLogger(__name__)

GENERATION_BYTES = 8


@dataclass(slots=True)
class _Job:
    hold: HoldId
    hold_below: HoldId
    keys: list[bytes]
    generations: list[int]
    generations_below: list[int]
    left: int


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

    def find(self, namespace: Namespace, keys: bytes, chunks: int, *, parent: bytes) -> tuple[int, HoldId]:
        """What the tier below has of the chunks behind `parent`, of which DRAM has `chunks`: how many, and a hold on them."""
        if not self._slower.can_read:
            return 0, HoldId(0)
        below, hold = self._slower.directory.acquire(namespace.id, keys, 0, parent)
        if below > chunks:
            failpoint.reach("daemon.promote.held")
        return below, HoldId(hold)

    def promote(
        self,
        namespace: Namespace,
        parent: bytes,
        keys: bytes,
        first: int,
        hold_below: HoldId,
        now_ns: int,
        *,
        is_urgent: bool,
    ) -> int:
        """Have the chunks behind `parent` read, `keys[0]` of which is at `first` in `hold_below`: how many are on their way.

        The hold below is given back or used. What is not urgent is read behind all that is.
        """
        placed, is_under_way = 0, False
        if keys:
            count = len(keys) // KEY_BYTES
            lower = self._slower.directory
            sources = lower.columns(hold_below)[1][first * GENERATION_BYTES : (first + count) * GENERATION_BYTES]
            hold, states, offsets, generations = self._directory.promote(
                namespace.id, namespace.size_class, parent, keys, now_ns, bytes([lower.level]) * count, sources
            )
            placed = _leading(states)
            reserved = [number for number in range(placed) if states[number] == SaveState.RESERVED]
            if reserved:
                slots = HoldId(hold), offsets, generations
                is_under_way = self._read(namespace, keys, reserved, slots, first, hold_below, is_urgent=is_urgent)
                placed = placed if is_under_way else reserved[0]
            if hold and not is_under_way:
                self._directory.release(hold, now_ns)
        if hold_below and not is_under_way:
            self._slower.directory.release(hold_below, now_ns)
        return placed

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
            fault = LoadFault.SOURCE if is_bad_below else LoadFault.PATH
            self._directory.fail_landing(key, generation, fault)
        if is_bad_below:
            log.error("chunk %s is bad in the slower tier: dropped there", key.hex()[:16])
        job.left -= 1
        if not job.left:
            del self._jobs[job_id]
            self._directory.release(job.hold, now_ns)
            self._slower.directory.release(job.hold_below, now_ns)
        return True

    def generation_below(self, job_id: int, chunk: int) -> int:
        """The generation of a chunk's slot below, while it is read; 0 where the job is none of these."""
        job = self._jobs.get(job_id)
        return 0 if job is None else job.generations_below[chunk]

    def _read(
        self,
        namespace: Namespace,
        keys: bytes,
        reserved: list[int],
        slots: tuple[HoldId, bytes, bytes],
        first: int,
        hold_below: HoldId,
        *,
        is_urgent: bool,
    ) -> bool:
        """Start the reading of the reserved chunks. False when the tier takes no more: then they are given up."""
        hold, offsets, generations = slots
        below = self._slower.directory.columns(hold_below)
        chosen = np.array(reserved)
        fresh: list[int] = np.frombuffer(generations, "<u8")[chosen].tolist()
        sources: list[int] = np.frombuffer(below[1], "<u8")[first + chosen].tolist()
        named = [keys[n * KEY_BYTES : (n + 1) * KEY_BYTES] for n in reserved]
        rows = pack_moves(
            named,
            [b""] * len(named),
            np.frombuffer(below[0], "<u8")[first + chosen].tolist(),
            np.frombuffer(offsets, "<u8")[chosen].tolist(),
            sources,
        )
        job_id = self._slower.read(namespace, rows, is_urgent=is_urgent)
        if not job_id:
            for key, generation in zip(named, fresh, strict=True):
                self._directory.fail_landing(key, generation, LoadFault.PATH)
            return False
        self._jobs[job_id] = _Job(hold, hold_below, named, fresh, sources, len(named))
        return True


def _leading(states: bytes) -> int:
    """How many leading chunks have a slot."""
    count = 0
    while count < len(states) and states[count] in (SaveState.PRESENT, SaveState.RESERVED):
        count += 1
    return count
