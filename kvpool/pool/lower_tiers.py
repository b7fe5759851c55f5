"""The tiers beside DRAM that a daemon can have: one line in `PLANNERS` for each kind of lower tier, the fastest first; remote
tiers in `REMOTES`, tiers of copies above DRAM in `COPIES`. Composition alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import SystemRandom

import kvpool_native
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespaces
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.tiering.link import Link
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import ArenaMemory, TierPlan
from kvpool.tiers.copies import CopyPlan
from kvpool.tiers.dram.tier import DramTier
from kvpool.tiers.hbm.plan import DESCRIPTORS, plan_hbm
from kvpool.tiers.hbm.plan import NAME as HBM
from kvpool.tiers.hbm.tier import HbmTier
from kvpool.tiers.remote import RemoteTier
from kvpool.tiers.slots import Slots, SlotSizes
from kvpool.tiers.ssd.directory import examine_place
from kvpool.tiers.ssd.plan import NAME as SSD
from kvpool.tiers.ssd.plan import plan_ssd, warning_of
from kvpool.tiers.ssd.tier import SsdTier
from kvpool.tiers.store.tier import StoreTier

# Plans a kind of tier; None where the configuration has none of it. Raises ConfigError.
Planner = Callable[[Config], TierPlan | None]
# Plans a tier of copies; None where the configuration has none of it. Raises ConfigError.
CopyPlanner = Callable[[Config], CopyPlan | None]
# Makes a remote tier, not started; None where the configuration has none of it. Raises ConfigError.
RemoteMaker = Callable[[ArenaMemory, Config, Clock], RemoteTier | None]


def _plan_ssd(config: Config) -> TierPlan | None:
    if not config.ssd.capacity:
        return None
    plan = plan_ssd(config.ssd)
    make = partial(SsdTier, plan)

    def examine() -> str:
        return examine_place(plan.path, is_made=plan.is_made) or warning_of(config)

    return TierPlan(SSD, plan.capacity, plan.max_chunks, plan.segments, "ssd.segment", make, examine)


def _make_store(memory: ArenaMemory, config: Config, clock: Clock) -> StoreTier | None:
    if not config.store.is_used:
        return None
    return StoreTier(memory, config.store, clock=clock, random=SystemRandom())


def _plan_hbm(config: Config) -> CopyPlan | None:
    plan = plan_hbm(config)
    if plan is None:
        return None
    return CopyPlan(HBM, HbmTier.level, plan.geometry, DESCRIPTORS, partial(HbmTier, plan))


PLANNERS: Sequence[Planner] = (_plan_ssd,)
REMOTES: Sequence[RemoteMaker] = (_make_store,)
COPIES: Sequence[CopyPlanner] = (_plan_hbm,)


@dataclass(frozen=True, slots=True)
class TierKinds:
    """The kinds of tiers that a pool may have beside its arena. `planners`: of lower tiers, the fastest first; `copies`: of
    tiers of copies, of which a configuration has one at most."""

    planners: Sequence[Planner]
    remotes: Sequence[RemoteMaker] = ()
    copies: Sequence[CopyPlanner] = ()


ALL_KINDS = TierKinds(PLANNERS, REMOTES, COPIES)


@dataclass(frozen=True, slots=True)
class TierPlans:
    """The tiers of a configuration: the lower ones, the fastest first, and those of copies, one at most."""

    lower: tuple[TierPlan, ...]
    copies: tuple[CopyPlan, ...]

    @property
    def further_entries(self) -> int:
        """Entries of the index for chunks that the arena does not have."""
        return sum(plan.max_chunks for plan in self.lower)

    @property
    def upper(self) -> kvpool_native.DirectoryGeometry | None:
        """The geometry of a tier of copies, where there is one."""
        return self.copies[0].geometry if self.copies else None

    @property
    def descriptors(self) -> int:
        """File descriptors that all of them keep open."""
        return sum(plan.descriptors for plan in self.lower) + sum(plan.descriptors for plan in self.copies)


@dataclass(frozen=True, slots=True)
class Setting:
    """Surroundings of the tiers of one pool. `on_settled`: called when jobs have ended."""

    config: Config
    clock: Clock
    remotes: Sequence[RemoteMaker]
    on_settled: Callable[[], None]


def capacities_of(config: Config) -> dict[str, int]:
    """The bytes that each kind of tier may take, by name; 0 where the configuration has none of it."""
    return {"dram": config.dram.capacity, SSD: config.ssd.capacity}


def plan_tiers(config: Config, kinds: TierKinds = ALL_KINDS) -> TierPlans:
    """The tiers of a configuration. Raises ConfigError."""
    lower = [plan for planner in kinds.planners if (plan := planner(config)) is not None]
    copies = [found for copy_planner in kinds.copies if (found := copy_planner(config)) is not None]
    names = [*(plan.name for plan in lower), *(found.name for found in copies)]
    assert len(set(names)) == len(names), "two tiers have one name"
    assert len(copies) <= 1, "the index has one region beside the arena's"
    return TierPlans(tuple(lower), tuple(copies))


def make_tiering(arena: DramTier, plans: TierPlans, namespaces: Namespaces, setting: Setting) -> Tiering:
    """The links of an arena to the tiers of these plans, and to the remote tiers of a configuration."""
    config, clock = setting.config, setting.clock
    memory = ArenaMemory(arena.arena, arena.index)
    lower = [plan.make(memory, config, clock) for plan in plans.lower]
    for_peers = PeerAllowance(config.peer.promoted)
    links = [Link(arena, tier, namespaces, clock, on_settled=setting.on_settled, for_peers=for_peers) for tier in lower]
    made = [make(memory, config, clock) for make in setting.remotes]
    remotes = [RemoteLink(arena.directory, tier, clock, on_settled=setting.on_settled) for tier in made if tier]
    view = kvpool_native.IndexView(arena.index)
    upper = [plan.make(_slots_of_copies(arena, plan, config), memory, config) for plan in plans.copies]
    copies = [CopyLink(arena, tier, namespaces, clock, index=view, on_settled=setting.on_settled) for tier in upper]
    return Tiering(arena, links, clock, remotes, copies=copies)


def _slots_of_copies(arena: DramTier, plan: CopyPlan, config: Config) -> Slots:
    """The slots of a tier of copies of what an arena has."""
    geometry = plan.geometry
    sizes = SlotSizes(geometry.segment_bytes, geometry.segments, geometry.max_chunks)
    directory = kvpool_native.Directory.of_copies(arena.directory, geometry, config.dram.policy)
    return Slots(plan.name, plan.level, sizes, directory)
