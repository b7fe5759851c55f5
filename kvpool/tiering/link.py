"""Link of an arena and a lower tier: all moves between the two.

Joins the decisions (promotions, demotions, admission) with a tier that moves the bytes, of any kind. Control thread only; no
call waits.

Invariants: both directories have the same namespaces with the same numbers; every job of the tier is in `_jobs`, with the
promotion, demotion or check that settles it.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvpool.checks.checksum_jobs import ChecksumJobs, Stored
from kvpool.clock import NS_PER_S, Clock
from kvpool.index.namespaces import Namespaces
from kvpool.tiering.admission import DECLINED, make_admission
from kvpool.tiering.demotions import Demotions
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.promotions import Promotions
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import ArenaTier, BackingTier, Counters, JobId, Moves
from kvpool.tiers.jobs import Jobs

# Evicted chunks remembered for each that the arena has room for. Measured on traces: with one the memory is too short to know
# which chunks are used again, with four it is long enough.
GHOSTS_PER_CHUNK = 4
# A tier that answers and has reported nothing of a job for so long has lost it. A guess: many times what a check waits behind
# everything else on a busy disk; a device that hangs is noticed by its own tier long before.
LOST_S = 300


class Link:
    """See the module. `on_settled` is called after jobs have been settled; `settled` is set then."""

    def __init__(
        self,
        upper: ArenaTier,
        lower: BackingTier,
        namespaces: Namespaces,
        clock: Clock,
        *,
        on_settled: Callable[[], None],
        for_peers: PeerAllowance | None = None,
    ) -> None:
        """`for_peers`: what may be promoted for other nodes; None: without a bound."""
        self._upper = upper
        self.lower = lower
        self._namespaces = namespaces
        self._clock = clock
        self._on_settled = on_settled
        self.settled = asyncio.Event()
        policy = lower.write_policy
        self.admission = make_admission(
            policy.admission,
            policy.budget_bytes,
            now_ns=clock.now_ns(),
            knows_chances=upper.directory.knows_chances,
        )
        self._jobs = Jobs(clock)
        self._bad_in_arena, self._bad_in_tier = BadChunkLog("dram", clock), BadChunkLog(lower.name, clock)
        self.promotions = Promotions(
            upper.directory,
            lower,
            clock,
            jobs=self._jobs,
            for_peers=for_peers or PeerAllowance(),
            bad_chunk_log=self._bad_in_tier,
        )
        self.demotions = Demotions(
            upper,
            lower,
            jobs=self._jobs,
            namespaces=namespaces,
            admission=self.admission,
            bad_chunk_log=self._bad_in_arena,
        )
        self.checksum_jobs = ChecksumJobs(lower, self._check, self._jobs, self._bad_in_tier)
        self._ghosts = GHOSTS_PER_CHUNK * upper.max_chunks  # to be remembered; 0: the directory does so already
        self._remember_evicted()
        namespaces.add_lower(lower.slots, lower.forget_namespace)

    def __repr__(self) -> str:
        return f"<Link to {self.lower!r}, {self._jobs!r}>"

    def start(self) -> None:
        """Begin to open the tier, in the background."""
        self.lower.start(self._namespaces, self)

    async def close(self) -> bool:
        """Close the tier and settle its jobs. False: its device does not answer, and is abandoned."""
        has_ended = await self.lower.close()
        for bad_chunk_log in (self._bad_in_arena, self._bad_in_tier):
            bad_chunk_log.close()
        return has_ended

    def change_admission(self) -> None:
        """Use the tier's present admission policy and budget from now on."""
        policy = self.lower.write_policy
        self.admission.change(policy.admission, policy.budget_bytes, self._clock.now_ns())
        self._remember_evicted()

    def on_completed(self) -> None:
        """See `TierOwner`: settle finished chunks, then start demotions that are due."""
        now_ns = self._clock.now_ns()
        for finished in self.lower.completed():
            self._jobs.settle(finished, now_ns)
        self.lower.keep_up()
        self.run()
        self.settled.set()
        self._on_settled()

    def on_doubt(self) -> None:
        """See `TierOwner`."""
        self.demotions.doubt()

    @property
    def can_take(self) -> bool:
        """Whether the tier can soon take chunks that only the arena has."""
        return self.lower.is_answering and not self._is_silent and self.demotions.may_write(self._clock.now_ns())

    @property
    def has_lost_job(self) -> bool:
        """Whether the tier answers, and has reported nothing of a job for so long that it never will."""
        return self._is_silent and self.lower.is_answering

    @property
    def _is_silent(self) -> bool:
        return self._jobs.silence_ns() > LOST_S * NS_PER_S

    def make_room(self) -> bool:
        """Start to demote the coldest chunks. Whether any job is under way whose end may make room."""
        self.run(is_urgent=True)
        return len(self.promotions) + len(self.demotions) > 0 and not self.has_lost_job

    def run(self, *, is_urgent: bool = False) -> None:
        """Start demotions that are due."""
        self.demotions.run(self._clock.now_ns(), is_urgent=is_urgent)

    def remember_retention(self, keys: Sequence[bytes]) -> None:
        """Record for a restart the retention of those chunks that the tier has."""
        for key in keys:
            if self.lower.slots.directory.retention(key) is not None:
                self.lower.touch(key)

    def stats(self) -> Counters:
        """Counters, by name: of the tier and of the moves."""
        upper, lower, name = self._upper.directory.stats(), self.lower.stats(), self.lower.name
        read_bytes, written_bytes = int(lower[f"{name}.read_bytes"]), int(lower[f"{name}.written_bytes"])
        return {
            **self.lower.slots.stats(),
            f"{name}.demoted_chunks": self.demotions.demoted_chunks,
            f"{name}.demotion_failed_chunks": self.demotions.failed_chunks,
            f"{name}.demotions_under_way": len(self.demotions),
            f"{name}.promoted_chunks": self.promotions.promoted_chunks,
            f"{name}.promotion_failed_chunks": self.promotions.failed_chunks,
            f"{name}.promotions_under_way": len(self.promotions),
            f"{name}.checks_under_way": self.checksum_jobs.pins,
            **{f"{name}.declined_{reason}": upper[f"declined_{reason}"] for reason in DECLINED},
            **{f"{name}.{key}": value for key, value in self.admission.stats(self._clock.now_ns()).items()},
            **lower,
            # Wear: bytes written for each byte read.
            f"{name}.written_per_read": round(written_bytes / max(1, read_bytes), 3),
        }

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """Broken invariants of the tier, its slots, and the holds and pins on them, one line each."""
        slots = self.lower.slots.verify(
            with_shared=with_shared, holds=self.promotions.holds, pins=self.checksum_jobs.pins
        )
        strays, name = self._jobs.strays, self.lower.name
        wrong = [f"{name}: {strays} reports were nobody's"] if strays else []
        if self._is_silent:  # a forked child asks: whether the tier answers would take a lock of its threads
            silence_s = self._jobs.silence_ns() // NS_PER_S
            wrong.append(
                f"{name}: a job has had no report for {silence_s} s, expected {LOST_S} at most: its device hangs, or the tier "
                "has lost it and the daemon needs a restart"
            )
        return slots + self.lower.verify() + wrong

    def _check(self, chunk: Stored) -> JobId:
        moves = Moves([chunk.key], [b""], [chunk.offset], [chunk.generation], [0], [0])
        return self.lower.check(self._namespaces.by_id(chunk.namespace), moves)

    def _remember_evicted(self) -> None:
        if self._ghosts and self.admission.needs_ghosts:
            self._upper.directory.remember_evicted(self._ghosts)
            self._ghosts = 0
