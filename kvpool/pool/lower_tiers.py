"""The tiers below DRAM that a daemon can have: one line in `PLANNERS` for each kind, the fastest first. Composition alone."""

from collections.abc import Callable, Sequence
from functools import partial

from kvpool.config.config import Config
from kvpool.tiers.base import TierPlan
from kvpool.tiers.ssd.plan import NAME as SSD
from kvpool.tiers.ssd.plan import plan_ssd
from kvpool.tiers.ssd.tier import SsdTier

# Plans a kind of tier; None where the configuration has none of it. Raises ConfigError.
Planner = Callable[[Config], TierPlan | None]


def _plan_ssd(config: Config) -> TierPlan | None:
    if not config.ssd.capacity:
        return None
    plan = plan_ssd(config.ssd)
    return TierPlan(SSD, plan.capacity, plan.max_chunks, plan.segments, "ssd.segment", partial(SsdTier, plan))


PLANNERS: Sequence[Planner] = (_plan_ssd,)


def capacities_of(config: Config) -> dict[str, int]:
    """The bytes that each kind of tier may take, by name; 0 where the configuration has none of it."""
    return {"dram": config.dram.capacity, SSD: config.ssd.capacity}


def plan_lower_tiers(config: Config, planners: Sequence[Planner] = PLANNERS) -> list[TierPlan]:
    """The tiers of a configuration, the fastest first. Raises ConfigError."""
    plans = [plan for planner in planners if (plan := planner(config)) is not None]
    assert len({plan.name for plan in plans}) == len(plans), "two tiers have one name"
    return plans
