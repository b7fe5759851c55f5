"""Two tiers as one: what moves between DRAM and the SSD tier, and what an earlier life left there.

Joins the decisions of `index` (promotions, demotions) with the bytes of `tiers.ssd`. The pool owns one of these where an SSD
tier is configured. Control thread only; what blocks runs in an executor and comes back through the event loop.

Invariants: the two directories have the same namespaces under the same numbers; every key that leaves the slower
directory is forgotten by the catalogue before another row is written.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.checks.ssd_checksum_jobs import SsdChecksumJobs
from kvpool.clock import Clock
from kvpool.config.config import Config, SsdConfig
from kvpool.errors import KVPoolError
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.keys import namespace_fingerprint
from kvpool.layout import WireLayout
from kvpool.tiering.admission import DECLINED, make_admission
from kvpool.tiering.demotions import Demotions
from kvpool.tiering.promotions import Promotions
from kvpool.tiering.restore_rows import pack_restore_rows
from kvpool.tiers.ssd.catalogue.rows import Row
from kvpool.tiers.ssd.directory import SsdUnavailable
from kvpool.tiers.ssd.size_classes import SsdClasses
from kvpool.tiers.ssd.status import SsdStatus, TierState
from kvpool.tiers.ssd.tier import Recovered, SsdTier
from kvpool.tiers.ssd.watch import SsdWatch
from kvpool.types import DEFAULT_PRIORITY, KEY_BYTES, SizeClassId

log = logging.getLogger(__name__)

# Opens the namespace of a model and a layout in wire form. Raises KVPoolError.
OpenNamespace = Callable[[str, WireLayout], Namespace]
RESTORE_ROWS = 2048
# Evicted chunks remembered for each that DRAM has room for. Measured on traces: with one the memory is too short to tell what
# comes again, with four it is not.
GHOSTS_PER_CHUNK = 4
# At most this part of DRAM is being written down at a time: what is, cannot be evicted meanwhile.
DEMOTING_FRACTION = 8
MS_PER_S = 1000


class Tiering:
    """Everything between the two tiers of one daemon."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tier: SsdTier,
        namespaces: Namespaces,
        clock: Clock,
        config: Config,
        *,
        max_chunks: int,
        on_settled: Callable[[], None],
    ) -> None:
        self._on_settled = on_settled
        self._fast = directory
        self.tier = tier
        self._namespaces = namespaces
        self._clock = clock
        self._classes = SsdClasses(tier.directory, tier.plan.segment_bytes)
        namespaces.lower_tier_classes = self._classes
        namespaces.on_given_back = self._forget_namespace
        self._numbers: dict[int, int] = {}  # the catalogue's number of a namespace, which outlives this daemon
        self._next_number = 1
        self.settled = asyncio.Event()
        self._tiers = kvpool_native.TierSet((directory, tier.directory))
        tier.directory.cap_retained(config.dram.retained_share)
        tier.directory.bound_chains(config.server.max_chain_chunks)
        self.promotions = Promotions(directory, self)
        self.admission = make_admission(
            config.ssd.admission, config.ssd.write_budget_bytes, clock.now_ns(), directory.knows_chances
        )
        self._ghosts = GHOSTS_PER_CHUNK * max_chunks  # 0: they are kept
        self.demotions = Demotions(
            directory,
            self,
            namespaces,
            watermark_bytes=int(config.dram.capacity * config.ssd.watermark),
            bytes_max=max(1, config.dram.capacity // DEMOTING_FRACTION),
            is_write_through=config.ssd.write_through,
            admission=self.admission,
        )
        self.ssd_checksum_jobs = SsdChecksumJobs(self, namespaces)
        self._keep_ghosts()
        self.restored_chunks = 0
        self.lost_chunks = 0
        self._watch = SsdWatch(tier, self._has_jobs, self._try_again)
        self._opening: asyncio.Task[None] | None = None

    @property
    def directory(self) -> kvpool_native.Directory:
        """The slower tier's directory."""
        return self.tier.directory

    @property
    def can_read(self) -> bool:
        """Whether chunks can be promoted."""
        return self.tier.can_read

    @property
    def can_write(self) -> bool:
        """Whether chunks can be demoted."""
        return self.tier.can_write

    @property
    def holds(self) -> int:
        """Holds that promotions have in the DRAM directory."""
        return self.promotions.holds

    @property
    def pins(self) -> int:
        """Pins that demotions have in the DRAM directory."""
        return self.demotions.pins

    def change_admission(self, config: SsdConfig) -> None:
        """Go on with another policy of admission and another budget."""
        self.admission.change(config.admission, config.write_budget_bytes, self._clock.now_ns())
        self._keep_ghosts()

    def size_class_of(self, namespace: Namespace) -> SizeClassId | None:
        """The slots of a namespace's chunks in the files; None where they do not fit a segment or a header."""
        return self._classes.of(namespace.layout)

    def read(self, namespace: Namespace, rows: bytes, *, is_urgent: bool) -> int:
        """See `SlowerTier`."""
        try:
            failpoint.reach("daemon.promote.before_read")
        except OSError:
            return 0
        self._watch.note_begun()
        layout = namespace.layout
        return self.tier.read(
            rows,
            namespace_fingerprint(namespace.model, layout),
            layout.layers,
            layout.chunk_bytes // layout.layers,
            is_urgent=is_urgent,
        )

    def write(self, namespace: Namespace, rows: bytes, tokens: list[bytes]) -> int:
        """See `SlowerTier`."""
        try:
            failpoint.reach("daemon.demote.before_write")
        except OSError:
            return 0
        self._watch.note_begun()
        layout = namespace.layout
        fingerprint = namespace_fingerprint(namespace.model, layout)
        return self.tier.write(rows, fingerprint, layout.layers, layout.chunk_bytes // layout.layers, tokens)

    def compare(self, namespace: Namespace, rows: bytes) -> int:
        """See `SlowerTier`."""
        self._watch.note_begun()
        layout = namespace.layout
        return self.tier.compare(
            rows, namespace_fingerprint(namespace.model, layout), layout.layers, layout.chunk_bytes // layout.layers
        )

    def remember(self, namespace: Namespace, key: bytes, parent: bytes, offset: int, generation: int) -> None:
        """See `SlowerTier`."""
        self.forget_departed()
        number = self._numbers.get(namespace.id)
        if number is None:
            number = self._numbers[namespace.id] = self._next_number
            self._next_number += 1
            self.tier.remember_namespace(number, (namespace.model, namespace.layout.to_wire()))
        layers, recency = namespace.layout.layers, self.tier.next_recency()
        place = (offset, generation, recency, namespace.layout.chunk_bytes // layers, layers, number)
        self.tier.remember(Row(key, parent, *place, *self._kept(key)))

    def touch(self, key: bytes) -> None:
        """See `SlowerTier`."""
        self.tier.touch(key, *self._kept(key))

    def _kept(self, key: bytes) -> tuple[int, int]:
        """The priority and duration, in whole seconds, that the catalogue has a chunk kept with."""
        priority, duration_ms = self.directory.retention(key) or (DEFAULT_PRIORITY, 0)
        return priority, -(-duration_ms // MS_PER_S)

    def _forget_namespace(self, namespace: Namespace) -> None:
        self.forget_departed()
        number = self._numbers.pop(namespace.id, None)
        if number is not None:
            self.tier.forget_namespace(number)

    def forget_departed(self) -> None:
        """Have the catalogue forget what has left the slower tier."""
        departed = self.directory.take_departed()
        for at in range(0, len(departed), KEY_BYTES):
            self.tier.forget(departed[at : at + KEY_BYTES])

    def remember_lapsed(self) -> None:
        """Have the catalogue know of priorities that have fallen back, or a restart would raise them again."""
        lapsed = self.directory.take_lapsed()
        for at in range(0, len(lapsed), KEY_BYTES):
            if self.directory.retention(lapsed[at : at + KEY_BYTES]) is not None:
                self.touch(lapsed[at : at + KEY_BYTES])

    def start_opening(self, open_namespace: OpenNamespace) -> None:
        """Begin to open the tier, beside everything else."""
        self._opening = asyncio.create_task(self.open(open_namespace))
        self._opening.add_done_callback(self._note_opening)

    def _note_opening(self, opening: "asyncio.Task[None]") -> None:
        """An opening that failed as nothing should must not leave the tier starting for ever."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.error("the ssd tier could not be opened", exc_info=error)
            self.tier.become(TierState.OFFLINE, f"{type(error).__name__}: {error}")

    async def open(self, open_namespace: OpenNamespace) -> None:
        """Open the tier and restore what an earlier life left. Never raises: one that cannot be opened is OFFLINE.

        Goes on trying, later each time, until it is cancelled.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                recovered = await loop.run_in_executor(None, self.tier.open)
                break
            except SsdUnavailable as error:
                self.tier.become(TierState.OFFLINE, str(error))
                if self.tier.is_stopping:
                    return
            await asyncio.sleep(self._watch.next_pause_s())
        await self._restore(recovered, open_namespace)
        failpoint.reach("daemon.ssd.restored")
        loop.add_reader(self.tier.fileno(), self.take_outcomes)
        self._watch.start(loop)
        self.tier.become(
            TierState.OK,
            f"at {self.tier.plan.path}: {self.restored_chunks} chunks found, {recovered.bad_rows} bad rows",
        )
        if self.tier.disk_warning:
            log.warning("%s", self.tier.disk_warning)
        self._on_settled()

    @contextlib.contextmanager
    def protecting(self, is_wanted: bool) -> Iterator[None]:
        """While nothing is evicted that only DRAM has, if the slower tier could take it soon."""
        can_take = is_wanted and self.tier.is_answering and self.demotions.may_write(self._clock.now_ns())
        self._fast.protect_unsaved(can_take)
        try:
            yield
        finally:
            self._fast.protect_unsaved(False)

    def make_room(self) -> bool:
        """Have the coldest chunks written down. Whether anything is under way that holds room."""
        self.run(is_urgent=True)
        return len(self.promotions) + len(self.demotions) > 0

    def run(self, *, is_urgent: bool = False) -> None:
        """Start demotions that are due."""
        self.demotions.run(self._clock.now_ns(), is_urgent=is_urgent)
        self._watch.see_to_it()

    async def close(self) -> bool:
        """End the opening and I/O; what is under way is settled. False: the disk does not answer, and is left alone."""
        loop = asyncio.get_running_loop()
        self.tier.stop_opening()
        if self._opening is not None:
            if self.tier.state == TierState.OFFLINE:
                self._opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._opening
        self._watch.stop()
        if self.tier.fileno() >= 0:
            loop.remove_reader(self.tier.fileno())
        return await loop.run_in_executor(None, self.tier.close)

    def stats(self) -> dict[str, int | float | str]:
        """Counters, by name."""
        slots, fast = self.directory.stats(), self._fast.stats()
        tier = self.tier.stats()
        return {
            "ssd.chunks": slots["chunks"],
            "ssd.used_bytes": slots["used_bytes"],
            "ssd.capacity_bytes": self.tier.plan.segments * self.tier.plan.segment_bytes,
            "ssd.evicted_chunks": slots["evicted_chunks"] + slots["shed_chunks"],
            "ssd.evicted_last_copies": slots["evicted_chunks"],
            **{f"ssd.{name}": slots[name] for name in ("kept_chunks", "kept_bytes")},
            "ssd.restored_chunks": self.restored_chunks,
            "ssd.lost_chunks": self.lost_chunks,
            "demoted_chunks": self.demotions.demoted_chunks,
            "demotions_failed": self.demotions.failed_chunks,
            "demotions_under_way": len(self.demotions),
            "promoted_chunks": fast["promoted_chunks"],
            "promotions_failed": self.promotions.failed_chunks,
            "promotions_under_way": len(self.promotions),
            "ssd.checks_under_way": self.ssd_checksum_jobs.pins,
            "ssd.retention_lapsed": slots["lapsed_chunks"],
            **{f"ssd.declined_{reason}": fast[f"declined_{reason}"] for reason in DECLINED},
            **self.admission.stats(self._clock.now_ns()),
            **tier,
            # Wear: what is written for each byte that is served.
            "ssd.written_per_read": round(int(tier["ssd.written_bytes"]) / max(1, int(tier["ssd.read_bytes"])), 3),
        }

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """Broken invariants of the slower directory, one line each. See `Directory.verify`."""
        problems = [f"ssd: {problem}" for problem in self.directory.verify(with_shared)]
        stats = self.directory.stats()
        found, expected = (stats["holds"], stats["pins"]), (self.promotions.holds, self.ssd_checksum_jobs.pins)
        if found != expected:
            problems.append(f"ssd: {found} holds and pins, {expected} are in promotions and checks")
        return problems

    def take_outcomes(self) -> None:
        """Settle what the tier has reported, a turn's worth of it, and start what is due after that."""
        now_ns = self._clock.now_ns()
        for job, chunk, status, tokens in self.tier.take_outcomes():
            is_good = status == SsdStatus.OK
            fault = "" if is_good else status.name.lower()
            if self.ssd_checksum_jobs.settle(job, fault=fault, is_bad=status.is_corruption):
                continue
            generation = self.promotions.generation_below(job, chunk)
            is_promotion = self.promotions.settle(
                job, chunk, is_good=is_good, is_bad_below=status.is_corruption, tokens=tokens, now_ns=now_ns
            )
            if not is_promotion:
                self.demotions.settle(
                    job, chunk, is_good=is_good, is_bad_here=status == SsdStatus.BAD_SOURCE, now_ns=now_ns
                )
            self._watch.note(status, generation, now_ns)
        self.forget_departed()
        self.remember_lapsed()
        self.run()
        self.settled.set()
        self._on_settled()

    def _keep_ghosts(self) -> None:
        if self._ghosts and self.admission.needs_ghosts:
            self._fast.keep_ghosts(self._ghosts)
            self._ghosts = 0

    def _has_jobs(self) -> bool:
        return len(self.promotions) + len(self.demotions) + self.ssd_checksum_jobs.pins > 0

    def _try_again(self) -> None:
        self._drop_lost()
        self.tier.try_again()
        self.forget_departed()
        self.run()

    def _drop_lost(self) -> None:
        """Forget the chunks that a failed sync covered: nobody knows whether the disk has them."""
        lost = self.tier.take_lost()
        if self.tier.has_failed_catalogue:
            self.demotions.doubt()
        for key, generation in lost:
            self.lost_chunks += self.directory.drop(key, generation)
        if lost:
            log.warning("%d chunks on disk are forgotten: they were not made certain", self.lost_chunks)

    async def _restore(self, recovered: Recovered, open_namespace: OpenNamespace) -> None:
        numbers = self._reopen(recovered, open_namespace)
        try:
            await self._restore_rows(recovered, numbers)
        finally:
            self._namespaces.leave(numbers.values())

    async def _restore_rows(self, recovered: Recovered, numbers: dict[int, Namespace]) -> None:
        packed = pack_restore_rows(recovered.rows, numbers, self.size_class_of)
        for first in range(0, len(packed), RESTORE_ROWS):
            failpoint.reach("daemon.ssd.restore")
            part = packed[first : first + RESTORE_ROWS]
            is_restored = np.frombuffer(self.directory.restore(part.tobytes(), self._clock.now_ns()), np.uint8)
            self.restored_chunks += int(is_restored.sum())
            for lost in np.flatnonzero(is_restored == 0):
                self.tier.forget(bytes(part["key"][lost]))
            await asyncio.sleep(0)
        self.directory.finish_restore(recovered.generation)

    def _reopen(self, recovered: Recovered, open_namespace: OpenNamespace) -> dict[int, Namespace]:
        """The namespaces of an earlier life that have chunks, by the catalogue's numbers; joined while they are restored."""
        with_chunks = set(np.unique(recovered.rows["namespace"]).tolist())
        numbers: dict[int, Namespace] = {}
        for number, (model, wire) in recovered.namespaces.items():
            self._next_number = max(self._next_number, number + 1)
            if number not in with_chunks:
                self.tier.forget_namespace(number)
                continue
            try:
                numbers[number] = open_namespace(model, wire)
            except KVPoolError as error:
                log.warning("chunks of model %s are not restored: %s", model, error)
            else:
                self._numbers[numbers[number].id] = number
                self._namespaces.join([numbers[number]])
        return numbers
