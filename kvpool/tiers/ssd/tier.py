"""The SSD tier: segment files, the chunks in their slots, and the catalogue that finds them after a restart.

It owns the slots, from the opening on the disk (`opened.py`) and the book of its catalogue, and its state; `kvpool.tiering`
decides which chunk is written or read. No failure here affects the arena: it changes the state of this tier, and its chunks
are misses.

    STARTING ──files open, catalogue read──► OK ◄──the disk has passed a probe, tried later each time──┐
        └──cannot be opened──► OFFLINE       ├──a write or the catalogue fails──► READONLY ────────────┤
                                             └──reads keep failing, or the disk does not answer──► OFFLINE

Control thread only, except where `Tier` says otherwise. Invariant: files and catalogue together never take more than
the capacity.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Clock, Stopwatch
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.keys import namespace_fingerprint
from kvpool.log_pace import LogPace
from kvpool.memory_limit import describe
from kvpool.states import Level
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    Moves,
    TierOwner,
    TierState,
    WritePolicy,
)
from kvpool.tiers.slots import Slots, SlotSizes
from kvpool.tiers.ssd.catalogue.book import CatalogueBook
from kvpool.tiers.ssd.corruption import CorruptionGuard
from kvpool.tiers.ssd.directory import SsdUnavailable
from kvpool.tiers.ssd.faults import IoFaults
from kvpool.tiers.ssd.headers import SsdHeaders
from kvpool.tiers.ssd.opened import CLOSE_TIMEOUT_S, Geometry, OpenSsd
from kvpool.tiers.ssd.opening import Opened, open_ssd
from kvpool.tiers.ssd.plan import NAME, SsdPlan, segment_name, warning_of
from kvpool.tiers.ssd.status import SsdStatus
from kvpool.tiers.ssd.watch import CATALOGUE, READS, WRITES, SsdWatch
from kvpool.units import format_duration

log = logging.getLogger(__name__)

# In a row. A single read that fails may be of a bad sector; a write that fails shows the disk.
READ_FAULTS_MAX = 8
WRITE_FAULTS_MAX = 1
# No request for room waits for a disk that has not answered I/O for so long. A healthy disk takes some milliseconds for a piece
# of a few MiB.
UNRESPONSIVE_S = 1.0
# What is shown as slow: work of the catalogue, a flush or a probe after so many `ssd.stall_timeout` (a checkpoint may have to
# sync 256 MiB), an opening after so many seconds.
SLOW_STALLS = 3
SLOW_OPENING_S = 60.0


@dataclass(slots=True)
class _Asked:
    """A job on the disk: `left` of its chunks have not ended. `generations`: of its slots, for a read; else empty."""

    left: int
    generations: Sequence[int] = ()
    is_write: bool = False


class SsdTier:
    """See the module, and `Backing`."""

    name = NAME
    level = Level.SSD

    def __init__(self, plan: SsdPlan, memory: ArenaMemory, config: Config, clock: Clock) -> None:
        self.plan = plan
        self._memory = memory
        self._clock = clock
        self.write_policy: WritePolicy = config.ssd
        self._warning = warning_of(config)
        self.slots = Slots(
            NAME,
            self.level,
            SlotSizes(
                plan.segment_bytes,
                plan.segments,
                plan.max_chunks,
                header_bytes=kvpool_native.ssd_header_bytes,
                extents_max=kvpool_native.SSD_EXTENTS_MAX,
            ),
            name_of_segment=lambda number: str(plan.path / segment_name(number)),
        )
        self.slots.directory.cap_retained(config.dram.retained_quota)
        self.slots.directory.bound_chains(config.server.max_chain_chunks)
        self._disk: OpenSsd | None = None  # until the tier is open
        self._book: CatalogueBook | None = None  # likewise
        self._owner: TierOwner = UNOWNED
        self._opening: set[asyncio.Task[None]] = set()
        self._jobs: dict[JobId, _Asked] = {}
        self._state = TierState.STARTING
        self.state_reason = ""
        self._disk_warning = ""
        self.headers = SsdHeaders(plan)
        self.corruption = CorruptionGuard()
        self._watch = SsdWatch(self)
        self._faults = {READS: IoFaults(READ_FAULTS_MAX), WRITES: IoFaults(WRITE_FAULTS_MAX)}
        self._pace = LogPace(clock)
        self._probe: asyncio.Future[str] | None = None
        self._probed = 0  # the record whose chunk is the next probe's
        self._checkpoints = 0  # at the last look
        self._io_errors = 0
        self._corrupt_chunks = 0
        self._bad_writes = 0
        self._lost_chunks = 0
        self._is_stopping = threading.Event()
        self._opening_time = Stopwatch()
        self._is_distrusted = False

    def __repr__(self) -> str:
        return f"<SsdTier {self.plan.path} {self.state.name.lower()}>"

    @property
    def state(self) -> TierState:
        """See the module."""
        return self._state

    @property
    def stall_s(self) -> float:
        """How long the disk may take for I/O before the tier is OFFLINE."""
        return self.plan.config.stall_timeout

    @property
    def can_read(self) -> bool:
        """Whether chunks can be read."""
        return self._disk is not None and self.state in (TierState.OK, TierState.READONLY)

    @property
    def can_write(self) -> bool:
        """Whether chunks can be written: none before a restart knows which generations this process may give to slots."""
        self._see_to_catalogue()
        return self._book is not None and self._book.catalogue.has_begun and self.state == TierState.OK

    @property
    def has_jobs(self) -> bool:
        """Whether I/O is under way or waits."""
        return bool(self._jobs)

    @property
    def is_answering(self) -> bool:
        """Whether the disk responds, so that waiting for it makes sense."""
        return self._unanswered_s < UNRESPONSIVE_S

    @property
    def has_stalled(self) -> bool:
        """Whether the tier is in use and its disk has not answered I/O for `stall_s`."""
        return self._unanswered_s >= self.stall_s and self.state in (TierState.OK, TierState.READONLY)

    @property
    def can_be_tried_again(self) -> bool:
        """Whether the tier is open and suspended because of errors, and not being retried."""
        is_suspended = self.state in (TierState.READONLY, TierState.OFFLINE)
        return self._disk is not None and is_suspended and self._probe is None

    @property
    def suspended(self) -> tuple[str, ...]:
        """Which of reads, writes and the catalogue have failed."""
        failed = [what for what, faults in self._faults.items() if faults.is_suspended]
        return (*failed, *((CATALOGUE,) if self._catalogue_failure is not None else ()))

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state, and log it once."""
        if state != self.state:
            log.log(logging.INFO if state == TierState.OK else logging.WARNING, "ssd tier %s %s", state.name, reason)
        self._state, self.state_reason = state, reason

    def rest_stalled(self) -> None:
        """Stop using a disk that does not answer."""
        self.become(TierState.OFFLINE, f"because the disk has left I/O unanswered for {self._unanswered_s:.1f} s")

    def try_again(self) -> None:
        """Probe the disk, and use the tier again if it passes; the next error suspends it again. What was not read before is
        not read by the probe either: a bad sector is no reason not to write."""
        assert self._disk is not None
        offset = self._stored_offset() if self.state == TierState.OFFLINE else None
        probe = partial(self._disk.probe, offset)
        with contextlib.suppress(RuntimeError):  # no thread can be started for it: it is tried again
            self._probe = asyncio.get_running_loop().run_in_executor(None, probe)
            self._probe.add_done_callback(self._end_probe)

    def _end_probe(self, probe: "asyncio.Future[str]") -> None:
        self._probe = None
        if self._is_stopping.is_set() or probe.cancelled():
            return
        if fault := probe.result():
            self._note_fault(READS if fault.startswith("read") else WRITES, fault)
            self._watch.see_to_it()
            return
        self._drop_lost()
        if self._book is not None and self._catalogue_failure is not None:
            self._book.catalogue.resume(checkpoint_s=self.plan.config.checkpoint_interval)
        self.corruption.end_rest()
        for faults in self._faults.values():
            faults.resume()
        self.become(TierState.OK, "because its disk has passed a probe")
        self._owner.on_completed()

    def _stored_offset(self) -> int | None:
        """Where a chunk lies, another one each time: a page that was written. None where there is no chunk."""
        directory = self.slots.directory
        places = directory.stats()["entries"]
        for first in (self._probed % places, 0) if places else ():
            self._probed = first + 1
            page = directory.records(first, 1, places)
            directory.unpin(page.pin)
            if page.records:
                return int(page.records[0].offset)
        return None

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        """Begin to open the tier in the background."""
        self._owner = owner
        if self._warning:
            log.warning("%s", self._warning)
        opening = asyncio.create_task(self._open(namespaces))
        opening.add_done_callback(self._note_opening)
        self._opening.add(opening)

    async def close(self) -> bool:
        """End the opening and I/O, and settle all jobs. False: the disk does not answer, and is abandoned."""
        loop = asyncio.get_running_loop()
        self._is_stopping.set()
        for opening in self._opening:
            if self.state == TierState.OFFLINE:
                opening.cancel()
            await asyncio.wait([opening], timeout=CLOSE_TIMEOUT_S)
            if not opening.done():
                log.error(
                    "the ssd tier is left while it is opened: the disk does not answer within %g s", CLOSE_TIMEOUT_S
                )
                return False
        self._watch.stop()
        self.headers.close()
        if self._disk is None or self._book is None:
            return True
        loop.remove_reader(self._disk.fileno)
        probes = [] if self._probe is None else [self._probe]
        if probes:
            await asyncio.wait(probes, timeout=CLOSE_TIMEOUT_S)
        closed = [await loop.run_in_executor(None, close) for close in (self._disk.close, self._book.close)]
        return all(closed) and all(probe.done() for probe in probes)

    def reconfigure(self, config: Config) -> None:
        """Use another admission policy and write budget from now on."""
        self.write_policy = config.ssd
        self._warning = warning_of(config)

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:
        """Start reading chunks into the arena."""
        if self._disk is None or not self.can_read:
            return NOT_STARTED
        job = self._disk.read(moves, _geometry(namespace), is_urgent=is_urgent)
        return self._begun(job, _Asked(len(moves), moves.generations))

    def write(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start writing chunks of the arena."""
        if self._disk is None or not self.can_write:
            return NOT_STARTED
        return self._begun(self._disk.write(moves, _geometry(namespace)), _Asked(len(moves), is_write=True))

    def check(self, namespace: Namespace, moves: Moves) -> JobId:
        """Start comparing chunks with their checksums, after all other jobs."""
        if self._disk is None or not self.can_read:
            return NOT_STARTED
        return self._begun(self._disk.check(moves, _geometry(namespace)), _Asked(len(moves)))

    def completed(self) -> list[Finished]:
        """Finished chunks, at most one turn's work."""
        if self._disk is None:
            return []
        now_ns, finished = self._clock.now_ns(), []
        for job, chunk, status, tokens in self._disk.completed():
            asked = self._jobs[job]
            self._note(self._disk, status, WRITES if asked.is_write else READS)
            self._watch.note_result(status, asked.generations[chunk] if asked.generations else 0, now_ns)
            asked.left -= 1
            if not asked.left:
                del self._jobs[job]
            fault = "" if status == SsdStatus.OK else status.name.lower()
            finished.append(Finished(job, chunk, status.outcome, fault, tokens))
        self._watch.see_to_it()
        if not self._is_distrusted and self._disk.is_distrusted:
            self._is_distrusted = True
            log.error(
                "%s: what was read or written differed from what it was a moment before: plain calls alone from now on, and "
                "everything that is written is read back",
                self.plan.path,
            )
        return finished

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Record published chunks in the catalogue."""
        assert self._book is not None
        self._book.remember(namespace, moves, chunks)

    def touch(self, key: bytes) -> None:
        """Record in the catalogue that a chunk was used now, or that its retention has changed."""
        if self._book is not None:
            self._book.touch(key)

    def keep_up(self) -> None:
        """Delete the catalogue's rows of chunks that have left the directory, and record which priorities have expired."""
        self._see_to_catalogue()
        if self._book is not None:
            self._book.keep_up()

    def checkpoint(self, timeout_s: float) -> bool:
        """Make everything that was written durable; nothing was where the tier never opened. Blocks."""
        return self._book is None or self._book.catalogue.checkpoint(timeout_s)

    def forget_namespace(self, namespace: Namespace) -> None:
        """Delete the catalogue's record of a namespace without chunks."""
        if self._book is not None:
            self._book.forget_namespace(namespace)

    async def note_flushed(self, namespaces: Sequence[Namespace] | None, generation: int | None) -> bool:
        """Have later starts skip the chunks that an operator has dropped. False: that is not durable, or what is on the disk
        comes back because the tier is not open."""
        if self._book is None:
            return False
        fingerprints = None if namespaces is None else [_fingerprint(namespace) for namespace in namespaces]
        loop = asyncio.get_running_loop()
        is_durable = await loop.run_in_executor(None, self._book.note_flushed, fingerprints, generation)
        self._book.settle_flushed()
        return is_durable

    def stats(self) -> Counters:
        """Counters, by name."""
        return {
            "ssd.state": self.state.name.lower(),
            "ssd.reason": self.state_reason,
            **CatalogueBook.counters(self._book),
            "ssd.lost_chunks": self._lost_chunks,
            "ssd.io_errors": self._io_errors,
            "ssd.unanswered_s": round(self._unanswered_s, 3),
            "ssd.corrupt_chunks": self._corrupt_chunks,
            "ssd.bad_writes": self._bad_writes,
            "ssd.io_distrusted": int(self._is_distrusted),
            **OpenSsd.counters(self._disk),
        }

    def info(self) -> Info:
        """The resources in use, for operators."""
        plan = self.plan
        return {
            "ssd_path": str(plan.path),
            "ssd_state": self.state.name.lower(),
            "ssd_reason": self.state_reason,
            "ssd_io": "none" if self._disk is None else self._disk.backend,
            "ssd_segments": plan.segments,
            "ssd_segment_bytes": plan.segment_bytes,
            "ssd_max_chunks": plan.max_chunks,
            "ssd_catalogue_bytes": plan.catalogue_bytes,
            "ssd_write_budget_bytes": self.write_policy.write_budget_bytes,
            **({"ssd_warning": self._warning} if self._warning else {}),
            **({"ssd_disk_warning": self._disk_warning} if self._disk_warning else {}),
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each: none, because the link verifies the slots."""
        return []

    def problems(self) -> list[str]:
        """Threads that have died, and a disk that changes bytes, one line each. Any thread."""
        died = ["catalogue"] if self._book is not None and self._book.catalogue.has_died else []
        died += ["headers"] if self.headers.has_died else []
        return [f"ssd: the thread of the {name} has died" for name in died] + self.corruption.problems()

    def shortcomings(self) -> list[str]:
        """Why chunks are not written or read, and faults of reads since the last one that succeeded. Any thread."""
        return self._suspensions() + self._slow_work()

    def _slow_work(self) -> list[str]:
        """What has waited for the disk for long, and a flush that is not durable."""
        disk, book = self._disk, self._book
        waited = () if disk is None or book is None else (*book.waits, ("a probe", disk.probing.elapsed_s))
        waits = [(what, seconds) for what, seconds in waited if seconds >= SLOW_STALLS * self.stall_s]
        if (opening_s := self._opening_time.elapsed_s) >= SLOW_OPENING_S:
            waits.append(("its opening", opening_s))
        slow = [f"ssd: {what} has taken {format_duration(max(1.0, seconds))} so far" for what, seconds in waits]
        failure = "" if book is None else book.flush_failure
        return [*slow, *([f"ssd: a restart may bring back what was flushed: {failure}"] if failure else [])]

    def _suspensions(self) -> list[str]:
        state, reason = self.state, self.state_reason
        if state == TierState.OFFLINE and self._disk is None:
            return [f"ssd: it could not be opened: {reason}"]
        if self.corruption.is_tripped:
            return []  # a problem, and not less
        if state in (TierState.OFFLINE, TierState.READONLY):
            is_read = state == TierState.READONLY
            effect = "chunks are read, and none is written" if is_read else "chunks are neither read nor written"
            return [f"ssd: {effect}: {reason}"]
        failing = self._faults[READS].describe()
        return [f"ssd: {failing}"] if failing else []

    async def _open(self, namespaces: Namespaces) -> None:
        """Open the tier and restore the chunks of earlier processes. OFFLINE while it cannot be opened.

        Retries, later each time, until it is cancelled.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                opened = await loop.run_in_executor(None, self._open_disk)
                break
            except SsdUnavailable as error:
                reason = str(error)
            except (RuntimeError, MemoryError) as error:  # no thread can be started for it
                reason = describe(error)
            self.become(TierState.OFFLINE, reason)
            if self._is_stopping.is_set():
                return
            await asyncio.sleep(self._watch.next_pause_s())
        self._disk = opened.disk
        self._book = book = CatalogueBook(self.slots, opened.catalogue, opened.floors)
        self._disk_warning = opened.disk_warning
        self.headers.epoch = opened.epoch
        self.corruption.begin_life(opened.generation)
        await book.restore(opened.rows, opened.namespaces, opened.generation, namespaces=namespaces, clock=self._clock)
        failpoint.reach("daemon.ssd.restored")
        loop.add_reader(opened.disk.fileno, self._owner.on_completed)
        self._watch.start(loop)
        found = f"{book.restored_chunks} chunks found, {opened.bad_rows} bad rows"
        self.become(TierState.OK, f"at {self.plan.path}: {found}")
        if self._disk_warning:
            log.warning("%s", self._disk_warning)
        self._see_to_catalogue()
        self._owner.on_completed()

    def _see_to_catalogue(self) -> None:
        """Write nothing while the catalogue cannot be written."""
        if self._book is None:
            return
        catalogue = self._book.catalogue
        if catalogue.checkpoints != self._checkpoints:
            self._checkpoints = catalogue.checkpoints
            self._watch.note_success(CATALOGUE)
        if catalogue.failure is not None and self.state == TierState.OK:
            self.become(TierState.READONLY, f"because its catalogue cannot be written: {catalogue.failure}")
            self._watch.see_to_it()

    @property
    def _catalogue_failure(self) -> BaseException | None:
        """Why the catalogue, or a sync of the data, has failed and was not retried yet."""
        return None if self._book is None else self._book.catalogue.failure

    @property
    def _unanswered_s(self) -> float:
        """How long the oldest I/O has been without an answer; 0 where none is under way."""
        return 0.0 if self._disk is None else self._disk.unanswered_s

    def _open_disk(self) -> Opened:
        """Open the disk, on an executor's thread. Closes it again if the daemon stops meanwhile."""
        with self._opening_time.running():
            opened = open_ssd(self.plan, self._memory, self._is_stopping)
        if self._is_stopping.is_set():
            opened.disk.close()
            opened.catalogue.close(CLOSE_TIMEOUT_S)
            raise SsdUnavailable("the daemon stops")
        return opened

    def _note_opening(self, opening: "asyncio.Task[None]") -> None:
        """Take the tier OFFLINE after an unexpected exception, so that it does not stay STARTING for ever."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.error("the ssd tier could not be opened", exc_info=error)
            self.become(TierState.OFFLINE, f"{type(error).__name__}: {error}")

    def _begun(self, job: JobId, asked: _Asked) -> JobId:
        if job:
            self._jobs[job] = asked
            self._watch.note_begun()
        return job

    def _note(self, disk: OpenSsd, status: SsdStatus, direction: str) -> None:
        if status == SsdStatus.IO_ERROR:
            self._io_errors += 1
            self._note_fault(direction, disk.fault or f"{direction} have failed")
        elif status == SsdStatus.BAD_WRITE:
            self._bad_writes += 1
            self._note_fault(WRITES, "a write was read back otherwise")
        elif status.is_corruption:
            self._corrupt_chunks += 1
        elif status == SsdStatus.OK:
            self._faults[direction].note_success()
            self._watch.note_success(direction)

    def _note_fault(self, direction: str, text: str) -> None:
        """Count a fault, and suspend what it shows to be failing."""
        faults = self._faults[direction]
        faults.note_fault(text, self._clock.now_ns())
        if faults.in_row == 1 and (end := self._pace.take_line()) is not None:
            log.warning("ssd: %s%s", text, end)
        if self._faults[READS].is_suspended:
            self.become(TierState.OFFLINE, self._faults[READS].describe())
        elif self._faults[WRITES].is_suspended:
            is_in_use = self.state in (TierState.OK, TierState.READONLY)
            self.become(TierState.READONLY if is_in_use else self.state, self._faults[WRITES].describe())

    def _drop_lost(self) -> None:
        """Forget the chunks that a failed sync covered: nobody knows whether the disk has them."""
        lost = [] if self._book is None else self._book.catalogue.take_lost()
        if self._catalogue_failure is not None:
            self._owner.on_lost()
        for key, generation in lost:
            self._lost_chunks += self.slots.directory.drop(key, generation)
        if lost:
            log.warning("%d chunks on disk are forgotten: they were not made certain", self._lost_chunks)


def _fingerprint(namespace: Namespace) -> bytes:
    return namespace_fingerprint(namespace.model, namespace.layout)


def _geometry(namespace: Namespace) -> Geometry:
    layout = namespace.layout
    return _fingerprint(namespace), layout.extents, layout.extent_bytes
