"""Names of extents with wrong bytes: layers, head groups and groups where the layout has them, nothing for a plain one."""

import pytest

from kvpool.layout import Layout
from kvpool.layouts.extent_names import where_in
from kvpool.layouts.groups import Group

HEADS = Layout(layers=3, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4)
HYBRID = Layout(
    chunk_tokens=32,
    groups=(
        Group(layers=2, kv_heads=2, head_dim=16),
        Group(kind="window", window=64, layers=6, kv_heads=1, head_dim=16),
        Group(kind="state", layers=3, state_bytes=64),
    ),
)


@pytest.mark.parametrize(
    ("layout", "extents", "where"),
    [
        (Layout(layers=3, kv_heads=4, head_dim=16, chunk_tokens=32), [1], ""),
        (HEADS, [], ""),
        (HEADS, [6], "layer 1 head group 2"),
        (HEADS, [0, 11], "layer 0 head group 0, layer 2 head group 3"),
        (HEADS, list(range(5)), "layer 0 head group 0, layer 0 head group 1, layer 0 head group 2, 2 more"),
        (HYBRID.of_group(0), [1], "full group, layer 1"),
        (HYBRID.of_group(1), [5], "window 64 group, layer 5"),
        (HYBRID.of_group(2), [2], "state group, layer 2"),
        (HYBRID.of_group(1), [], "window 64 group"),
    ],
)
def test_an_extent_is_named_by_what_its_layout_has(layout: Layout, extents: list[int], where: str) -> None:
    assert where_in(layout, extents) == where
