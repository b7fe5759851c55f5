"""Flushing: an operator's order to drop what nobody holds, from one tier or all, in parts.

Control thread only; `now_ns` is an argument. Holds no state.
"""

from collections.abc import Mapping

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.errors import Refused
from kvpool.index.namespaces import Namespaces
from kvpool.index.parts import PART_CHUNKS, Parts


def flush(
    tiers: Mapping[str, kvpool_native.Directory],
    view: kvpool_native.IndexView,
    namespaces: Namespaces,
    model: str | None,
    older_than_s: float | None,
    tier: str,
    now_ns: int,
) -> Parts[dict[str, int]]:
    """Drop chunks of one model or all, unused for a time or at any age, from one of `tiers` or (empty) all.

    What is stored or used meanwhile stays. `chunks` counts those that left the tier, or with no tier named those that `view`
    finds no more; `bytes` in every tier; `skipped` those that are held. Raises Refused for a tier that there is not.
    """
    if tier and tier not in tiers:
        raise Refused("argument", f"tier is {tier[:32]!r}, expected one of {', '.join(tiers)}")
    before_ns = now_ns + 1 if older_than_s is None else now_ns - int(min(now_ns, older_than_s * NS_PER_S))
    owners = None if model is None else [int(entry.id) for entry in namespaces.of_model(model)]
    total, gone = [0, 0, 0], 0
    for directory in [tiers[tier]] if tier else tiers.values():
        walk, has_more = kvpool_native.FlushWalk(directory, owners, before_ns), True
        while has_more:
            found_before = view.count
            has_more = walk.advance(PART_CHUNKS)
            gone += found_before - view.count
            yield None
        total = [before + more for before, more in zip(total, walk.result(), strict=True)]
    chunks, size, skipped = total
    return {"chunks": chunks if tier else gone, "bytes": size, "skipped": skipped}
