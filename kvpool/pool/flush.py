"""Flush: an operator's order to drop chunks without holds, from one tier or all, in parts.

Control thread only. Holds no state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.errors import Refused
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.index.parts import PART_CHUNKS, Parts
from kvpool.states import Level
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import Writable


@dataclass(frozen=True, slots=True)
class FlushOrder:
    """Order to drop chunks of `model` (None: any), unused for `older_than_s` (None: any), in `tier` (empty: all)."""

    model: str | None
    older_than_s: float | None
    tier: str
    now_ns: int


def flush(
    directory: kvpool_native.Directory,
    tiering: Tiering,
    order: FlushOrder,
    *,
    view: kvpool_native.IndexView,
    namespaces: Namespaces,
    on_part: Callable[[], None],
) -> Parts[dict[str, int]]:
    """Drop what an order says and nobody holds. `directory`: DRAM's. `on_part` is called behind each part.

    A lower tier knows before the answer what was dropped.

    Chunks stored or used meanwhile stay. `chunks` counts those that left the tier, or without a tier those that `view` no
    longer finds; `bytes` in every tier; `skipped` those that are held. Raises Refused for an unknown tier.
    `durable`: no restart brings one back.
    """
    lower = {link.tier.name: link.tier for link in tiering.lower}
    by_level = {Level.DRAM: ("dram", directory)}
    by_level |= {slots.level: (slots.name, slots.directory) for slots in tiering.slots}
    tiers = dict(tier for _, tier in sorted(by_level.items()))
    if order.tier and order.tier not in tiers:
        raise Refused("argument", f"tier is {order.tier[:32]!r}, expected one of {', '.join(tiers)}")
    age_ns = -1 if order.older_than_s is None else int(min(order.now_ns, order.older_than_s * NS_PER_S))
    of_model = None if order.model is None else namespaces.of_model(order.model)
    owners = None if of_model is None else [int(entry.id) for entry in of_model]
    left_tier = left_pool = size = skipped = 0
    certain: list[bool] = []
    for name in [order.tier] if order.tier else tiers:
        walk, has_more = kvpool_native.FlushWalk(tiers[name], owners, order.now_ns - age_ns), True
        while has_more:
            found_before = view.count
            has_more = walk.advance(PART_CHUNKS)
            left_pool += found_before - view.count
            on_part()
            yield None
        dropped = walk.result()
        size, skipped = size + dropped.bytes, skipped + dropped.skipped
        left_tier += dropped.chunks
        if name in lower:
            yield _note(lower[name], of_model, walk.generation if order.older_than_s is None else None, certain)
    left = left_tier if order.tier else left_pool
    return {"chunks": left, "bytes": size, "skipped": skipped, "durable": all(certain)}


async def _note(
    tier: Writable, namespaces: Sequence[Namespace] | None, generation: int | None, certain: list[bool]
) -> None:
    certain.append(await tier.note_flushed(namespaces, generation))
