"""Link of an arena and one tier beside it: the jobs under way between the two, and what each kind of link counts.

    Link         what every link has: the tier's start and end, its jobs, and how long it has reported none of them
    StockedLink  beside that the slots of a tier with a directory here, and the checks of its chunks
    LowerLink    promotions and demotions (`lower_link.py`)
    RemoteLink   pulls (`remote_link.py`)
    CopyLink     copies to a tier above (`copies/copy_link.py`)

Control thread only; no call waits. Invariant: every job of the tier is in `_jobs`, with what settles it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvpool.checks.checksum_jobs import ChecksumJobs
from kvpool.clock import NS_PER_S, Clock
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespaces
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import ArenaTier, Counters, Stocked, Tier
from kvpool.tiers.jobs import Jobs

# A tier that answers and has reported nothing of a job for so long has lost it. A guess: many times what a check waits behind
# everything else on a busy disk; a device that hangs is noticed by its own tier long before, and a pull has its own deadline.
LOST_S = 300

TierT = TypeVar("TierT", bound=Tier, covariant=True)
StockedT = TypeVar("StockedT", bound=Stocked, covariant=True)


@dataclass(frozen=True, slots=True)
class ArenaSide:
    """The arena's side of a link. `on_settled`: called after jobs have been settled."""

    arena: ArenaTier
    namespaces: Namespaces
    clock: Clock
    on_settled: Callable[[], None] = lambda: None


class Link(Generic[TierT]):
    """See the module."""

    def __init__(self, side: ArenaSide, tier: TierT) -> None:
        self.tier = tier
        self._arena = side.arena.directory
        self._namespaces = side.namespaces
        self._clock = side.clock
        self._on_settled = side.on_settled
        self._jobs = Jobs(side.clock)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.tier!r}, {self._jobs!r}>"

    @property
    def holds(self) -> int:
        """Holds of its jobs in the arena's directory."""
        return 0

    @property
    def pins(self) -> int:
        """Pins of its jobs in the arena's directory."""
        return 0

    @property
    def corrupt_in_arena(self) -> int:
        """Chunks that were found bad in the arena when they were to be moved, and dropped."""
        return 0

    def start(self) -> None:
        """Begin to open the tier, in the background."""
        self.tier.start(self._namespaces, self)

    async def close(self) -> bool:
        """Close the tier and settle its jobs. False: its device does not answer, and is abandoned."""
        has_ended = await self.tier.close()
        self._note_closed()
        return has_ended

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on."""

    def on_completed(self) -> None:
        """See `TierOwner`: settle finished chunks."""
        self._settle_finished()
        self._on_settled()

    def on_lost(self) -> None:
        """See `TierOwner`. Nothing is written there, so nothing is lost."""

    def make_room(self) -> bool:
        """Have the coldest chunks leave the arena. Whether any job is under way whose end may make room."""
        return self.holds + self.pins > 0

    def stats(self) -> Counters:
        """Counters, by name: of the tier and of the moves."""
        return self.tier.stats()

    def verify(self, *, with_shared: bool = True) -> list[str]:  # noqa: ARG002 - for slots
        """Broken invariants of the tier, its slots, and the holds and pins on them, one line each."""
        strays, name = self._jobs.strays, self.tier.name
        wrong = [f"{name}: {strays} reports were nobody's"] if strays else []
        if self._is_silent:  # a forked child asks: whether the tier answers would take a lock of its threads
            silence_s = self._jobs.silence_ns() // NS_PER_S
            wrong.append(
                f"{name}: a job has had no report for {silence_s} s, expected {LOST_S} at most: its device hangs, or the tier "
                "has lost it and the daemon needs a restart"
            )
        return self.tier.verify() + wrong

    @property
    def _is_silent(self) -> bool:
        return self._jobs.silence_ns() > LOST_S * NS_PER_S

    def _note_closed(self) -> None:
        """The tier is closed."""

    def _settle_finished(self) -> int:
        """Settle the chunks that have ended: their number."""
        now_ns, finished = self._clock.now_ns(), self.tier.completed()
        for one in finished:
            self._jobs.settle_chunk(one, now_ns)
        return len(finished)


class StockedLink(Link[StockedT]):
    """See the module. Invariant: both directories have the same namespaces with the same numbers."""

    def __init__(self, side: ArenaSide, tier: StockedT) -> None:
        super().__init__(side, tier)
        self.slots = tier.slots
        self._bad_in_arena = BadChunkLog("dram", side.clock)
        self._bad_in_tier = BadChunkLog(tier.name, side.clock)
        self.checksum_jobs = ChecksumJobs(tier, side.namespaces, self._jobs, self._bad_in_tier)

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """See `Link`."""
        pins = self.checksum_jobs.pins + self._kept_below
        return self.slots.verify(with_shared=with_shared, holds=self._holds_below, pins=pins) + super().verify()

    @property
    def _holds_below(self) -> int:
        """Holds of its jobs in the tier's directory."""
        return 0

    @property
    def _kept_below(self) -> int:
        """Pins in the tier's directory on what its jobs are to read soon."""
        return 0

    def _note_closed(self) -> None:
        self._bad_in_arena.close()
        self._bad_in_tier.close()
