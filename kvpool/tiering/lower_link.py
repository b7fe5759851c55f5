"""Link of an arena and a lower tier: all moves between the two.

Joins the decisions (promotions, demotions, admission) with a tier that moves the bytes, of any kind. Control thread only; no
call waits.
"""

import asyncio
from collections.abc import Sequence

from kvpool.config.config import Config
from kvpool.tiering.admission import DECLINED, POLICIES, Admission, WriteBudget
from kvpool.tiering.demotions import Demotions
from kvpool.tiering.link import ArenaSide, StockedLink
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.promotions import Promotions
from kvpool.tiers.base import Backing, Counters

# Evicted chunks remembered for each that the arena has room for. Measured on traces: with one the memory is too short to know
# which chunks are used again, with four it is long enough.
GHOSTS_PER_CHUNK = 4


class LowerLink(StockedLink[Backing]):
    """See the module. `settled` is set after jobs have been settled."""

    def __init__(self, side: ArenaSide, lower: Backing, for_peers: PeerAllowance | None = None) -> None:
        """`for_peers`: what may be promoted for other nodes; None: without a bound."""
        super().__init__(side, lower)
        self.settled = asyncio.Event()
        policy = lower.write_policy
        budget = WriteBudget(policy.write_budget_bytes, side.clock.now_ns())
        self.admission = Admission(POLICIES[policy.admission], budget, self._arena.knows_chances)
        self.promotions = Promotions(
            self._arena,
            lower,
            side.clock,
            jobs=self._jobs,
            for_peers=for_peers or PeerAllowance(),
            bad_chunk_log=self._bad_in_tier,
        )
        self.demotions = Demotions(
            side.arena,
            lower,
            jobs=self._jobs,
            namespaces=side.namespaces,
            admission=self.admission,
            bad_chunk_log=self._bad_in_arena,
        )
        self._ghosts = GHOSTS_PER_CHUNK * side.arena.max_chunks  # to be remembered; 0: the directory does so already
        self._remember_evicted()
        side.namespaces.add_lower(self.slots, lower.forget_namespace)

    @property
    def holds(self) -> int:
        """See `Link`: those of promotions."""
        return self.promotions.holds

    @property
    def pins(self) -> int:
        """See `Link`: those of demotions."""
        return self.demotions.pins

    @property
    def corrupt_in_arena(self) -> int:
        """See `Link`."""
        return self.demotions.corrupt_chunks

    def reconfigure(self, config: Config) -> None:
        """See `Link`; also the tier's admission policy and budget."""
        self.tier.reconfigure(config)
        policy = self.tier.write_policy
        self.admission.change(policy.admission, policy.write_budget_bytes, self._clock.now_ns())
        self._remember_evicted()

    def on_completed(self) -> None:
        """See `TierOwner`: settle finished chunks, then start demotions that are due."""
        self._settle_finished()
        self.tier.keep_up()
        self.run()
        self.settled.set()
        self._on_settled()

    def on_lost(self) -> None:
        """See `TierOwner`."""
        self.demotions.doubt()

    @property
    def can_take(self) -> bool:
        """Whether the tier can soon take chunks that only the arena has."""
        return self.tier.is_answering and not self._is_silent and self.demotions.may_write(self._clock.now_ns())

    @property
    def has_lost_job(self) -> bool:
        """Whether the tier answers, and has reported nothing of a job for so long that it never will."""
        return self._is_silent and self.tier.is_answering

    def make_room(self) -> bool:
        """See `Link`. Promotions for other nodes count in any case: they end soon."""
        self.run(is_urgent=True)
        is_moving = len(self.promotions) + len(self.demotions) > 0 and not self.has_lost_job
        return is_moving or self.promotions.for_peers.taken > 0

    def run(self, *, is_urgent: bool = False) -> None:
        """Start demotions that are due."""
        self.demotions.run(self._clock.now_ns(), is_urgent=is_urgent)

    def remember_retention(self, keys: Sequence[bytes]) -> None:
        """Record for a restart the retention of those chunks that the tier has."""
        for key in keys:
            if self.slots.directory.retention(key) is not None:
                self.tier.touch(key)

    def stats(self) -> Counters:
        """See `Link`."""
        upper, lower, name = self._arena.stats(), self.tier.stats(), self.tier.name
        read_bytes, written_bytes = int(lower[f"{name}.read_bytes"]), int(lower[f"{name}.written_bytes"])
        return {
            **self.slots.stats(),
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

    @property
    def _holds_below(self) -> int:
        return self.promotions.holds

    @property
    def _kept_below(self) -> int:
        return self.promotions.kept

    def _remember_evicted(self) -> None:
        if self._ghosts and self.admission.needs_ghosts:
            self._arena.remember_evicted(self._ghosts)
            self._ghosts = 0
