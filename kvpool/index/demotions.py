"""Demotion: chunks written to the slower tier before DRAM needs their slots.

Takes the prefix of the coldest chunk that the slower tier lacks, from the root on, so that what stands below is always
whole prefixes, and as much of it as the write budget has left. While it is written it is held, so its slots stay; nothing of
it counts as used by that. Its chunks are kept below with the priorities that they have in DRAM. What was written and gave way
below is written again only when it has been used since, or a tier smaller than DRAM would be written without end.

Bounded by bytes under way. What of a job is on disk with all before it becomes visible there while the rest is written.
Control thread only; no I/O. Invariant: each job in `_jobs` has one hold in the DRAM directory and one reservation in the one
below, and ends both when the last of its chunks has been reported.
"""

import logging
from dataclasses import dataclass

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.index.admission import LEAST_CHANCE, UNBOUNDED, Admission, Admitted
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.index.slower import SlowerTier, pack_moves
from kvpool.types import DEFAULT_PRIORITY, KEY_BYTES, HoldId, Level, NamespaceId, ReservationId, SaveState

log = logging.getLogger(__name__)

# Chunks looked at from the cold end for one that is not written yet: a guess that keeps the control thread quick.
SCAN_CHUNKS = 512
SCAN_ALL = (1 << 32) - 1
# So many chunks of a job become visible at once, while others of it are being written. Chunks cost the control thread 20 µs
# each (measured): of a long job all at its end would be an idle disk's time.
PUBLISHED_AT_ONCE = 16


@dataclass(slots=True)
class _Job:
    namespace: Namespace
    hold: HoldId
    reservation: ReservationId
    keys: list[bytes]
    parents: list[bytes]
    offsets: list[int]
    generations: list[int]
    size: int
    left: int
    is_good: list[bool]
    ready: int = 0  # leading chunks that are on disk
    published: int = 0  # leading chunks that are visible there


class Demotions:
    """All demotions under way. `bytes_max` bounds them; `watermark_bytes` of DRAM in use begins them."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        slower: SlowerTier,
        namespaces: Namespaces,
        *,
        watermark_bytes: int,
        bytes_max: int,
        is_write_through: bool,
        admission: Admission,
    ) -> None:
        self._directory = directory
        self._slower = slower
        self._namespaces = namespaces
        self._watermark_bytes = watermark_bytes
        self._bytes_max = bytes_max
        self._is_write_through = is_write_through
        self._admission = admission
        self._jobs: dict[int, _Job] = {}
        self._bytes = 0
        self.demoted_chunks = 0
        self.failed_chunks = 0
        self.corrupt_chunks = 0

    def __repr__(self) -> str:
        return f"<Demotions {len(self._jobs)} jobs, {self._bytes} bytes>"

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def holds(self) -> int:
        """Holds that demotions have in the DRAM directory."""
        return len(self._jobs)

    def may_write(self, now_ns: int) -> bool:
        """Whether anything would be written now."""
        return self._admit(now_ns) and self._slower.can_write

    def run_all(self, now_ns: int) -> None:
        """Start writing whatever DRAM alone has, worth it or not and whatever the budget, as far as there is room.

        What gave way below is not written once more, until the directory forgets that.
        """
        self._directory.admit(Admitted.ALL)
        while self._has_room:
            held = self._directory.hold_unsaved(SCAN_ALL, False)
            if not held[0] or not self._start(held, now_ns, UNBOUNDED):
                return

    def write(self, namespace: Namespace, keys: bytes, now_ns: int) -> None:
        """Start writing what the slower tier lacks of this prefix, worth it or not, as far as there is room and budget."""
        chunks, hold = self._directory.acquire(namespace.id, keys) if self._has_room else (0, 0)
        if not chunks:
            return
        saved, hold_below = self._slower.directory.acquire(namespace.id, keys[: chunks * KEY_BYTES])
        if hold_below:
            self._slower.directory.release_untouched(hold_below)
        # What is on its way up has no bytes here to write yet, whatever has become of it below.
        levels = self._directory.columns(hold)[2][saved:]
        if set(levels) == {Level.DRAM}:
            affordable = self._admission.affordable(_slot_bytes(namespace), now_ns, is_ordered=True)
            self._start((hold, 0, saved, namespace.id, 0), now_ns, affordable)
        else:
            self._directory.release_untouched(hold)

    def run(self, now_ns: int, *, is_urgent: bool = False) -> None:
        """Start what may be started: above the watermark (or `is_urgent`) the coldest chunks, with write-through the newest."""
        is_newest_first = self._is_write_through and not is_urgent
        while (
            self._admit(now_ns)
            and self._has_room
            and (is_urgent or self._is_write_through or self._directory.stats()["used_bytes"] > self._watermark_bytes)
        ):
            held = self._directory.hold_unsaved(SCAN_CHUNKS, is_newest_first)
            if not held[0]:
                return
            namespace = self._namespaces.by_id(NamespaceId(held[3]))
            if not self._start(held, now_ns, self._admission.affordable(_slot_bytes(namespace), now_ns)):
                self._admit(now_ns)
                return

    def settle(self, job_id: int, chunk: int, *, is_good: bool, is_bad_here: bool, now_ns: int) -> bool:
        """A chunk has been written or not. False when the job is none of these."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.is_good[chunk] = is_good
        if is_bad_here:
            self.corrupt_chunks += 1
            log.error("chunk %s is corrupt in memory: dropped", job.keys[chunk].hex()[:16])
            self._directory.drop(job.keys[chunk])
        while job.ready < len(job.is_good) and job.is_good[job.ready]:
            job.ready += 1
        job.left -= 1
        if not job.left:
            del self._jobs[job_id]
            self._finish(job, now_ns)
        elif job.ready - job.published >= PUBLISHED_AT_ONCE:
            self._publish(job)
        return True

    @property
    def _has_room(self) -> bool:
        return self._slower.can_write and (self._bytes < self._bytes_max or not self._jobs)

    def _admit(self, now_ns: int) -> bool:
        """Have the directory know what is written now. Whether anything is."""
        step = self._admission.step(now_ns)
        self._directory.admit(step, LEAST_CHANCE)
        return step != Admitted.NOTHING

    def _start(self, held: tuple[int, int, int, int, int], now_ns: int, chunks_max: int) -> bool:
        """Write a held prefix as far as the tier takes it, `chunks_max` at most. False when that is nothing."""
        hold, _, saved, namespace_id, _ = held
        namespace = self._namespaces.by_id(NamespaceId(namespace_id))
        size_class = self._slower.size_class_of(namespace)
        packed = self._directory.keys_of(hold)
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        taken = 0
        if size_class is not None and chunks_max > 0:
            parent = keys[saved - 1] if saved else b""
            wanted = packed[saved * KEY_BYTES : (saved + chunks_max) * KEY_BYTES]
            reservation, states, offsets, generations = self._slower.directory.reserve(
                namespace.id, size_class, parent, wanted, now_ns
            )
            taken = states.count(SaveState.RESERVED)
            priorities, durations_ms = self._directory.retentions(hold)
            if priorities.strip(bytes([DEFAULT_PRIORITY])):
                self._slower.directory.retain(namespace.id, packed, priorities, durations_ms, now_ns)
        if not taken:
            self._directory.release_untouched(hold)
            return False
        first = saved + states.index(SaveState.RESERVED)
        arena = np.frombuffer(self._directory.columns(hold)[0], "<u8")
        places = np.frombuffer(offsets, "<u8")[first - saved : first - saved + taken]
        fresh = np.frombuffer(generations, "<u8")[first - saved : first - saved + taken]
        job = _Job(
            namespace,
            HoldId(hold),
            ReservationId(reservation),
            keys[first : first + taken],
            [keys[n - 1] if n else b"" for n in range(first, first + taken)],
            places.tolist(),
            fresh.tolist(),
            taken * namespace.layout.chunk_bytes,
            taken,
            [False] * taken,
        )
        rows = pack_moves(job.keys, job.parents, job.offsets, arena[first : first + taken].tolist(), job.generations)
        job_id = self._slower.write(namespace, rows, [self._directory.tokens_of(key) for key in job.keys])
        if not job_id:
            self._slower.directory.end_reservation(reservation, now_ns)
            self._directory.release_untouched(hold)
            return False
        self._jobs[job_id] = job
        self._bytes += job.size
        self._admission.spend(taken * _slot_bytes(namespace), now_ns)
        return True

    def _publish(self, job: _Job) -> None:
        """Make visible below what of the job is on disk with all that precedes it."""
        failpoint.reach("daemon.demote.written")
        checksums = bytes(4 * job.namespace.layout.layers * (job.ready - job.published))
        states = self._slower.directory.commit(job.reservation, job.published, checksums)
        failpoint.reach("daemon.demote.committed")
        for number, state in enumerate(states, job.published):
            if state == SaveState.STORED:
                self.demoted_chunks += 1
                place = (job.offsets[number], job.generations[number])
                self._slower.remember(job.namespace, job.keys[number], job.parents[number], *place)
        job.published = job.ready

    def _finish(self, job: _Job, now_ns: int) -> None:
        self._bytes -= job.size
        if job.ready > job.published:
            self._publish(job)
        self.failed_chunks += len(job.is_good) - job.ready
        self._slower.directory.end_reservation(job.reservation, now_ns)
        self._directory.release_untouched(job.hold)


def _slot_bytes(namespace: Namespace) -> int:
    """Bytes that the disk writes for a chunk: its header too."""
    return namespace.layout.chunk_bytes + kvpool_native.SSD_HEADER_BYTES
