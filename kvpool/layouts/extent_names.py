"""Names of extents, for people: which layer, head group and group of a layout has wrong bytes. Pure; any thread."""

from collections.abc import Sequence

from kvpool.layout import Layout

NAMED_MAX = 3


def where_in(layout: Layout, extents: Sequence[int]) -> str:
    """The place of extents in a chunk: its group's role, then the layer and head group of each, the first ones of many.

    Empty for a layout without head groups that is of no group: there the chunk says it all.
    """
    parts = [] if layout.group is None else [f"{layout.group} group"]
    if extents and (parts or layout.head_groups > 1):
        parts += [_name_of(layout, extent) for extent in extents[:NAMED_MAX]]
        if len(extents) > NAMED_MAX:
            parts.append(f"{len(extents) - NAMED_MAX} more")
    return ", ".join(parts)


def _name_of(layout: Layout, extent: int) -> str:
    if extent >= layout.kv_extents:
        return f"summaries, extent {extent - layout.kv_extents}"
    layer, head_group = divmod(extent, layout.head_groups)
    return f"layer {layer} head group {head_group}" if layout.head_groups > 1 else f"layer {layer}"
