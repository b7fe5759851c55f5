"""Flushing: an operator's order to drop what nobody holds, from one tier or all.

Control thread only; `now_ns` is an argument. Holds no state.
"""

from collections.abc import Mapping

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.errors import Refused
from kvpool.index.namespaces import Namespaces


def flush(
    tiers: Mapping[str, kvpool_native.Directory],
    view: kvpool_native.IndexView,
    namespaces: Namespaces,
    model: str | None,
    older_than_s: float | None,
    tier: str,
    now_ns: int,
) -> dict[str, int]:
    """Drop chunks of one model or all, unused for a time or at any age, from one of `tiers` or (empty) all.

    `chunks` counts those that left the tier, or with no tier named those that `view` finds no more; `bytes` in every tier;
    `skipped` those that are held. Raises Refused for a tier that there is not.
    """
    if tier and tier not in tiers:
        raise Refused("argument", f"tier is {tier[:32]!r}, expected one of {', '.join(tiers)}")
    before_ns = now_ns + 1 if older_than_s is None else now_ns - int(min(now_ns, older_than_s * NS_PER_S))
    owners: list[int | None] = [None] if model is None else [entry.id for entry in namespaces.of_model(model)]
    total = {"chunks": 0, "bytes": 0, "skipped": 0}
    found_before = view.count
    for directory in [tiers[tier]] if tier else tiers.values():
        for owner in owners:
            for name, count in zip(total, directory.flush(owner, before_ns), strict=True):
                total[name] += count
    if not tier:
        total["chunks"] = found_before - view.count
    return total
