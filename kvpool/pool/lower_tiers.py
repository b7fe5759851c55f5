"""The tiers below DRAM that a daemon can have: one line in `PLANNERS` for each kind, the fastest first; remote tiers in
`REMOTES`. Composition alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import SystemRandom

from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespaces
from kvpool.tiering.link import Link
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import ArenaMemory, TierPlan
from kvpool.tiers.dram.tier import DramTier
from kvpool.tiers.remote import RemoteTier
from kvpool.tiers.ssd.plan import NAME as SSD
from kvpool.tiers.ssd.plan import plan_ssd
from kvpool.tiers.ssd.tier import SsdTier
from kvpool.tiers.store.tier import StoreTier

# Plans a kind of tier; None where the configuration has none of it. Raises ConfigError.
Planner = Callable[[Config], TierPlan | None]
# Makes a remote tier, not started; None where the configuration has none of it. Raises ConfigError.
RemoteMaker = Callable[[ArenaMemory, Config, Clock], RemoteTier | None]


def _plan_ssd(config: Config) -> TierPlan | None:
    if not config.ssd.capacity:
        return None
    plan = plan_ssd(config.ssd)
    return TierPlan(SSD, plan.capacity, plan.max_chunks, plan.segments, "ssd.segment", partial(SsdTier, plan))


def _make_store(memory: ArenaMemory, config: Config, clock: Clock) -> StoreTier | None:
    if not config.store.is_used:
        return None
    return StoreTier(memory, config.store, clock=clock, random=SystemRandom())


PLANNERS: Sequence[Planner] = (_plan_ssd,)
REMOTES: Sequence[RemoteMaker] = (_make_store,)


@dataclass(frozen=True, slots=True)
class TierKinds:
    """The kinds of tiers that a pool may have beside its arena. `planners`: of lower tiers, the fastest first."""

    planners: Sequence[Planner]
    remotes: Sequence[RemoteMaker] = ()


ALL_KINDS = TierKinds(PLANNERS, REMOTES)


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


def plan_lower_tiers(config: Config, planners: Sequence[Planner] = PLANNERS) -> list[TierPlan]:
    """The tiers of a configuration, the fastest first. Raises ConfigError."""
    plans = [plan for planner in planners if (plan := planner(config)) is not None]
    assert len({plan.name for plan in plans}) == len(plans), "two tiers have one name"
    return plans


def make_tiering(
    arena: DramTier,
    plans: Sequence[TierPlan],
    namespaces: Namespaces,
    setting: Setting,
) -> Tiering:
    """The links of an arena to the tiers of these plans, and to the remote tiers of a configuration."""
    config, clock = setting.config, setting.clock
    memory = ArenaMemory(arena.arena, arena.index)
    lower = [plan.make(memory, config, clock) for plan in plans]
    for_peers = PeerAllowance(config.peer.promoted)
    links = [Link(arena, tier, namespaces, clock, on_settled=setting.on_settled, for_peers=for_peers) for tier in lower]
    made = [make(memory, config, clock) for make in setting.remotes]
    remotes = [RemoteLink(arena.directory, tier, clock, on_settled=setting.on_settled) for tier in made if tier]
    return Tiering(arena, links, clock, remotes)
