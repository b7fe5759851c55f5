"""The tiers beside DRAM that a daemon can have: one line in `KINDS` for each. Composition alone.

A kind is planned from a configuration, made for an arena, and linked to it as a lower tier, one of copies, or a remote one. The
modules of a tier are imported where a configuration has it: together they take a tenth of a start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import SystemRandom

import kvpool_native
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.tiering.link import ArenaSide, Link
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import ArenaMemory, Backing, Exported, Tier
from kvpool.tiers.remote import Remote


@dataclass(frozen=True, slots=True)
class Site:
    """Surroundings of a pool's tiers. `for_peers`: what may be promoted for other nodes."""

    side: ArenaSide
    memory: ArenaMemory
    config: Config
    for_peers: PeerAllowance

    @property
    def clock(self) -> Clock:
        """The pool's."""
        return self.side.clock

    def lower(self, tier: Backing) -> LowerLink:
        """The link to a lower tier."""
        return LowerLink(self.side, tier, self.for_peers)

    def copies(self, tier: Exported) -> CopyLink:
        """The link to a tier of copies."""
        return CopyLink(self.side, tier, kvpool_native.IndexView(self.memory.index))

    def remote(self, tier: Remote) -> RemoteLink:
        """The link to a remote tier."""
        return RemoteLink(self.side, tier)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Plan of a configured tier: what others need before it is made.

    `link`: makes the tier, not started, and its link. `further_entries`: entries of the index for chunks that the arena does
    not have; `region`: of a tier of copies, which has a part of the index. `descriptors`: file descriptors that it keeps open;
    `descriptors_option` names the option that changes their number. `examine`: why it could not be opened at this moment, or
    what is odd; empty for nothing. It touches nothing and blocks.
    """

    link: Callable[[Site], Link[Tier]]
    further_entries: int = 0
    region: kvpool_native.DirectoryGeometry | None = None
    descriptors: int = 0
    descriptors_option: str = ""
    examine: Callable[[], str] = str


# Plans a kind of tier; None where the configuration has none of it. Raises ConfigError.
Planner = Callable[[Config], TierPlan | None]


def _plan_ssd(config: Config) -> TierPlan | None:
    if not config.ssd.capacity:
        return None
    from kvpool.tiers.ssd.directory import examine_place  # with LMDB
    from kvpool.tiers.ssd.plan import plan_ssd, warning_of
    from kvpool.tiers.ssd.tier import SsdTier

    plan = plan_ssd(config.ssd)
    return TierPlan(
        lambda site: site.lower(SsdTier(plan, site.memory, site.config, site.clock)),
        further_entries=plan.max_chunks,
        descriptors=plan.segments,
        descriptors_option="ssd.segment",
        examine=lambda: examine_place(plan.path, is_made=config.ssd.create) or warning_of(config),
    )


def _plan_hbm(config: Config) -> TierPlan | None:
    if not config.hbm.is_used:
        return None
    from kvpool.tiers.hbm.plan import DESCRIPTORS, plan_hbm  # with the driver of a device
    from kvpool.tiers.hbm.tier import HbmTier

    plan = plan_hbm(config)
    return TierPlan(
        lambda site: site.copies(HbmTier(plan, site.memory, site.config)),
        region=plan.geometry,
        descriptors=DESCRIPTORS,
    )


def _plan_store(config: Config) -> TierPlan | None:
    if not config.store.is_used:
        return None
    from kvpool.tiers.store.tier import StoreTier  # with the child process of a library

    return TierPlan(
        lambda site: site.remote(StoreTier(site.memory, config.store, clock=site.clock, random=SystemRandom()))
    )


KINDS: Sequence[Planner] = (_plan_hbm, _plan_ssd, _plan_store)


@dataclass(frozen=True, slots=True)
class TierPlans:
    """The plans of all tiers of a configuration, of which one at most has copies."""

    all: tuple[TierPlan, ...]

    @property
    def further_entries(self) -> int:
        """Entries of the index for chunks that the arena does not have."""
        return sum(plan.further_entries for plan in self.all)

    @property
    def region(self) -> kvpool_native.DirectoryGeometry | None:
        """The region of the index for copies, where there is one."""
        return next((plan.region for plan in self.all if plan.region is not None), None)

    @property
    def descriptors(self) -> int:
        """File descriptors that all of them keep open."""
        return sum(plan.descriptors for plan in self.all)


def capacities_of(config: Config) -> dict[str, int]:
    """The bytes that each kind of tier may take, by name; 0 where the configuration has none of it."""
    return {"dram": config.dram.capacity, "ssd": config.ssd.capacity}


def plan_tiers(config: Config, kinds: Sequence[Planner] = KINDS) -> TierPlans:
    """The tiers of a configuration. Raises ConfigError."""
    plans = TierPlans(tuple(plan for planner in kinds if (plan := planner(config)) is not None))
    assert sum(plan.region is not None for plan in plans.all) <= 1, "the index has one region beside the arena's"
    return plans


def make_tiering(plans: TierPlans, site: Site) -> Tiering:
    """The links of an arena to the tiers of these plans."""
    return Tiering(site.side.arena, [plan.link(site) for plan in plans.all], site.clock)
