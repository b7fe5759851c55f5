"""Demotions: chunks written to a lower tier before the arena needs their slots.

A demotion takes the coldest chunk that the lower tier lacks, with all its ancestors that the tier lacks, so that the tier
always has whole prefixes; of these as many as the write budget allows. Meanwhile the chunks have a pin: their slots stay, their
place in the order of eviction does not change, and they do not count as used. In the lower tier they get the priorities that
they have in DRAM. A chunk that was written and evicted there is written again only after its next use, and so are its
descendants: else a tier smaller than DRAM, or than a chain, would be written without end.

Two bounds: bytes under way, and chunks started in one turn of the control thread. A long chain is pinned whole and written part
by part, each part after the one before is visible in the lower tier. Written chunks of a job become visible there in order
while the others are being written, except chunks that were dropped in DRAM meanwhile, and their descendants. A chain that the
tier refuses keeps its pin until the end of the turn, so that the search continues with other chains; the next turn tries it
again.

Control thread only; no I/O. Invariant: each chain has one pin in the arena's directory, and either one job under way or a place
in `_unfinished`; a job has one reservation in the lower tier's directory, which ends after its last chunk was reported.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.ids import HoldId, NamespaceId, ReservationId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import pack_u64, u32_of, u64_of
from kvpool.states import DEFAULT_PRIORITY, SaveState, WriteOrder
from kvpool.tiering.admission import LEAST_CHANCE, UNBOUNDED, Admission, Admitted
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import NOT_STARTED, ArenaTier, Finished, JobId, Moves, Outcome, Writable
from kvpool.tiers.jobs import Jobs

# Chunks that are examined from the cold end on for one that is not written yet: a guess that keeps turns short.
SCAN_CHUNKS = 512
# Chunks whose writing starts in one turn of the control thread: each costs it up to 10 µs (measured: `kvpoolctl bench turns`).
STARTED_AT_ONCE = 32
# At most this part of the arena is being written at a time, because it cannot be evicted meanwhile.
DEMOTING_FRACTION = 8
# Slots of DRAM examined in one turn for chunks that were written before, at some nanoseconds each.
FORGOTTEN_AT_ONCE = 8192
# Chunks of refused chains in one turn, pinned and not written: a guess that bounds the turn.
REFUSED_AT_ONCE = 512
# So many chunks of a job become visible at once, while its others are being written. Each costs the control thread 20 µs
# (measured): all chunks of a long job at its end would leave the disk idle for that time.
PUBLISHED_AT_ONCE = 16


# How many chunks of a size may be written at a time.
Affordable = Callable[[int, int], int]


@dataclass(slots=True)
class _Chain:
    """Pinned chunks of one chain; the lower tier has the parent of the first. Columns have a value for each chunk."""

    namespace: Namespace
    pin: HoldId
    parent: bytes
    keys: KeyColumn
    places: "memoryview[int]"  # offsets in the arena
    slots: "memoryview[int]"  # slot numbers there
    sources: "memoryview[int]"  # generations in DRAM
    priorities: bytes
    durations_ms: "memoryview[int]"
    affordable: Affordable
    end: int  # how many chunks are to be written
    next: int = 0  # the chunks before this index are written or being written

    @property
    def size(self) -> int:
        """Payload bytes of all its chunks."""
        return len(self.places) * self.namespace.layout.stored_bytes


@dataclass(slots=True)
class _Refused:
    """Chains that the tier has refused in this turn."""

    chains: list[_Chain] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """How many chunks they have."""
        return sum(len(chain.places) for chain in self.chains)


@dataclass(slots=True, eq=False)
class _Job:
    chain: _Chain
    reservation: ReservationId
    moves: Moves
    sources: list[int]  # generations in the arena
    is_good: list[bool]
    ready: int = 0  # leading chunks that are written
    published: int = 0  # leading chunks that were committed in the lower tier's directory
    stored: int = 0  # those of them that it has accepted
    is_in_doubt: bool = False  # the tier may have lost what it has written


class Demotions:
    """All demotions under way to one tier. `bytes_max` bounds them."""

    def __init__(
        self,
        arena: ArenaTier,
        lower: Writable,
        *,
        jobs: Jobs,
        namespaces: Namespaces,
        admission: Admission,
        bad_chunk_log: BadChunkLog,
    ) -> None:
        """`bad_chunk_log`: of the arena's."""
        self._directory = arena.directory
        self._lower = lower
        self._jobs = jobs
        self._namespaces = namespaces
        self._admission = admission
        self._bad_chunk_log = bad_chunk_log
        self._policy = lower.write_policy
        self._watermark_bytes = int(arena.capacity_bytes * self._policy.watermark)
        self._bytes_max = max(1, arena.capacity_bytes // DEMOTING_FRACTION)
        self._under_way: set[_Job] = set()
        self._unfinished: deque[_Chain] = deque()  # chains whose next part is to be started
        self._forget_from: int | None = None  # the slot at which `forget_written` goes on
        self._bytes = 0
        self.demoted_chunks = 0
        self.failed_chunks = 0
        self.corrupt_chunks = 0

    def __repr__(self) -> str:
        return f"<Demotions {len(self._under_way)} jobs, {self._bytes} bytes>"

    def __len__(self) -> int:
        return len(self._under_way) + len(self._unfinished)

    @property
    def pins(self) -> int:
        """Pins that demotions have in the DRAM directory."""
        return len(self)

    def may_write(self, now_ns: int) -> bool:
        """Whether anything would be written now."""
        return self._admit(now_ns) and self._lower.can_write

    def forget_written(self) -> None:
        """Have the next calls of `run_all` write again chunks that the lower tier had and has evicted."""
        self._forget_from = 0

    def run_all(self, now_ns: int, order: WriteOrder, *, is_forced: bool = True) -> bool:
        """Start to write all chunks that only DRAM has, at last those that are held, whatever admission says, as far as room
        and (unless forced) budget allow. False: no more can start now; True: the turn is over, the next call continues.

        Chunks that the lower tier has evicted are not written again, unless `forget_written` was called.
        """
        if self._forget_from is not None:
            self._forget_from = self._directory.forget_written(self._forget_from, FORGOTTEN_AT_ONCE) or None
            return True
        affordable: Affordable = (lambda _size, _now_ns: UNBOUNDED) if is_forced else self._admission.affordable
        self._directory.admit(Admitted.ALL)
        left = self._go_on(now_ns)
        of_held: Iterator[kvpool_native.Pinned] | None = None
        with self._passing_refused() as refused:
            while left > 0 and refused.chunks < REFUSED_AT_ONCE and self._has_room:
                pinned = self._directory.pin_unsaved(SCAN_CHUNKS, order)
                if not pinned.id and not pinned.chunks:
                    of_held = of_held or self._pins_of_held()
                    pinned = next(of_held, pinned)
                if not pinned.id:
                    return pinned.chunks > 0  # no chain was found among the examined chunks; there may be more
                started = self._begin(pinned, affordable, now_ns, chunks_max=left, refused=refused)
                if started is None:
                    return False
                left -= started
        return left <= 0

    def _pins_of_held(self) -> Iterator[kvpool_native.Pinned]:
        """Pins on chunks that somebody holds and only DRAM has: one of a chain, one of each chunk without a parent."""
        for holder in self._directory.unsaved_holders():
            position = self._directory.last_unsaved(holder)
            while position is not None:
                yield self._directory.pin_unsaved_hold(holder, position)
                position = self._directory.last_unsaved(holder, position)

    def write(self, namespace: Namespace, parent: bytes, keys: KeyColumn, now_ns: int) -> None:
        """Start to write those of these chunks that the lower tier lacks, whatever admission says, as far as room and budget
        allow.

        `parent`: the key before them, empty at the root.
        """
        if not self._has_room:
            return
        pinned = self._directory.pin_unsaved_prefix(namespace.id, keys.packed, parent)
        if pinned.id:
            affordable = partial(self._admission.affordable, is_ordered=True)
            with self._passing_refused() as refused:
                self._begin(pinned, affordable, now_ns, chunks_max=STARTED_AT_ONCE, refused=refused)

    def run(self, now_ns: int, *, is_urgent: bool = False) -> None:
        """Start one turn of due writes: above the watermark (or `is_urgent`) the coldest, with write-through the newest."""
        order = WriteOrder.NEWEST if self._policy.write_through and not is_urgent else WriteOrder.COLDEST
        left = self._go_on(now_ns)
        with self._passing_refused() as refused:
            while (
                left > 0
                and refused.chunks < REFUSED_AT_ONCE
                and self._admit(now_ns)
                and self._has_room
                and (is_urgent or self._policy.write_through or self._directory.unsaved_bytes > self._watermark_bytes)
            ):
                pinned = self._directory.pin_unsaved(SCAN_CHUNKS, order)
                if not pinned.id:
                    return
                started = self._begin(pinned, self._admission.affordable, now_ns, chunks_max=left, refused=refused)
                if started is None:
                    self._admit(now_ns)
                    return
                left -= started

    def settle_chunk(self, job: _Job, finished: Finished) -> None:
        """Note that a chunk of a job was written, or was not."""
        chunk = finished.chunk
        job.is_good[chunk] = finished.outcome is Outcome.DONE and not job.is_in_doubt
        if finished.outcome is Outcome.BAD_SOURCE:
            self.corrupt_chunks += 1
            place = f"offset {job.moves.arena_offsets[chunk]} of the arena"
            self._bad_chunk_log.note_bad_chunk(job.moves.keys[chunk], finished.fault, place)
            self._directory.drop(job.moves.keys[chunk], job.sources[chunk])
        while job.ready < len(job.is_good) and job.is_good[job.ready]:
            job.ready += 1
        if job.ready - job.published >= PUBLISHED_AT_ONCE:
            self._publish(job)

    def _finish(self, job: _Job, now_ns: int) -> None:
        """End a job whose last chunk was reported."""
        if job.ready > job.published:
            self._publish(job)
        self._under_way.remove(job)
        self.failed_chunks += len(job.is_good) - job.stored
        self._lower.slots.directory.end_reservation(job.reservation, now_ns)
        if job.stored == len(job.is_good) and job.chain.next < job.chain.end:
            self._unfinished.append(job.chain)
        else:
            self._end(job.chain)

    def doubt(self) -> None:
        """A failure: count the written and unpublished chunks of all jobs under way as not written."""
        for job in self._under_way:
            job.is_in_doubt = True
            job.is_good[job.published :] = [False] * (len(job.is_good) - job.published)
            job.ready = job.published

    @property
    def _has_room(self) -> bool:
        return self._lower.can_write and (self._bytes < self._bytes_max or not len(self))

    def _admit(self, now_ns: int) -> bool:
        """Report the admission step to the directory. Whether anything is written at this step."""
        step = self._admission.step(now_ns)
        self._directory.admit(step, LEAST_CHANCE)
        return step != Admitted.NOTHING

    @contextlib.contextmanager
    def _passing_refused(self) -> Iterator[_Refused]:
        """The list of chains refused in this turn; their pins end with it."""
        refused = _Refused()
        try:
            yield refused
        finally:
            for chain in refused.chains:
                self._end(chain)

    def _begin(
        self,
        pinned: kvpool_native.Pinned,
        affordable: Affordable,
        now_ns: int,
        *,
        chunks_max: int,
        refused: _Refused,
    ) -> int | None:
        """Start to write pinned chunks, at most `chunks_max` now. How many it has started: 0 where the tier refuses this chain,
        which is then in `refused`; None where the tier or the budget takes no more."""
        slots = self._directory.columns([pinned.id])
        priorities, durations_ms = self._directory.retentions(pinned.id)
        chain = _Chain(
            self._namespaces.by_id(NamespaceId(pinned.namespace)),
            HoldId(pinned.id),
            pinned.parent,
            KeyColumn(self._directory.keys_of([pinned.id])),
            u64_of(slots.offsets),
            u64_of(slots.slots),
            u64_of(slots.generations),
            priorities,
            u32_of(durations_ms),
            affordable,
            pinned.chunks,
        )
        self._bytes += chain.size
        started = self._start_part(chain, now_ns, chunks_max=chunks_max)
        if started == 0:
            refused.chains.append(chain)
        elif started is None:
            self._end(chain)
        return started

    def _go_on(self, now_ns: int) -> int:
        """Start the next parts of unfinished chains. How many more chunks this turn may start."""
        left = STARTED_AT_ONCE
        while left > 0 and self._unfinished:
            chain = self._unfinished.popleft()
            started = self._start_part(chain, now_ns, chunks_max=left) if self._lower.can_write else None
            if not started:
                self._end(chain)
            left -= started or 0
        return left

    def _start_part(self, chain: _Chain, now_ns: int, *, chunks_max: int) -> int | None:
        """Start to write the next chunks of a chain, as far as tier and budget allow. Returns as `_begin` does."""
        below = self._lower.slots
        size_class = below.size_class_of(chain.namespace.layout)
        affordable = chain.affordable(self._slot_bytes(chain.namespace), now_ns)
        count = min(chain.end - chain.next, chunks_max, affordable)
        if size_class is None:
            return 0
        if count <= 0:
            return None
        begin, end = chain.next, chain.next + count
        before, wanted = chain.keys.before(begin, chain.parent), chain.keys[begin:end]
        made = below.directory.reserve(chain.namespace.id, size_class, before, wanted.packed, now_ns)
        taken = made.states.count(SaveState.RESERVED)
        if chain.priorities[begin:end].strip(bytes([DEFAULT_PRIORITY])):
            durations_ms = chain.durations_ms[begin:end].tobytes()
            below.directory.retain(chain.namespace.id, wanted.packed, chain.priorities[begin:end], durations_ms, now_ns)
        if not taken:
            return 0
        first = made.states.index(SaveState.RESERVED)
        keys = wanted[first : first + taken]
        written = slice(begin + first, begin + first + taken)
        moves = Moves(
            keys=list(keys),
            parents=keys.parents(wanted.before(first, before)),
            offsets=u64_of(made.offsets)[first : first + taken].tolist(),
            generations=u64_of(made.generations)[first : first + taken].tolist(),
            arena_offsets=chain.places[written].tolist(),
            arena_slots=chain.slots[written].tolist(),
            tokens=[self._directory.tokens_of(key) for key in keys],
        )
        job_id = self._write(chain.namespace, moves)
        if not job_id:
            below.directory.end_reservation(made.id, now_ns)
            return None
        chain.next = begin + first + taken
        if chain.next < end:
            chain.end = chain.next  # the tier takes no more of this chain
        sources = chain.sources[written].tolist()
        job = _Job(chain, ReservationId(made.id), moves, sources, [False] * taken)
        self._jobs.add_job(job_id, taken, partial(self.settle_chunk, job), partial(self._finish, job))
        self._under_way.add(job)
        self._admission.spend(taken * self._slot_bytes(chain.namespace), now_ns)
        return taken

    def _write(self, namespace: Namespace, moves: Moves) -> JobId:
        try:
            failpoint.reach("daemon.demote.before_write")
        except OSError:
            return NOT_STARTED
        return self._lower.write(namespace, moves)

    def _publish(self, job: _Job) -> None:
        """Commit the leading written chunks of a job in the lower tier's directory, so that they are found there."""
        failpoint.reach("daemon.demote.written")
        checksums = bytes(4 * job.chain.namespace.layout.extents * (job.ready - job.published))
        sources = pack_u64(job.sources[job.published : job.ready])
        states = self._lower.slots.directory.commit(job.reservation, job.published, checksums, sources=sources)
        failpoint.reach("daemon.demote.committed")
        stored = [number for number, state in enumerate(states, job.published) if state == SaveState.STORED]
        self._lower.remember(job.chain.namespace, job.moves, stored)
        job.published = job.ready
        job.stored += len(stored)
        self.demoted_chunks += len(stored)

    def _end(self, chain: _Chain) -> None:
        self._bytes -= chain.size
        self._directory.unpin(chain.pin)

    def _slot_bytes(self, namespace: Namespace) -> int:
        """Bytes that the tier writes for one chunk."""
        return self._lower.slots.slot_bytes(namespace.layout)
