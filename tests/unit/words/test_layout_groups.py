"""Layouts with groups: one full group is a plain layout, each group has a layout and keys of its own, and the wire form."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.keys import DEFAULT_DOMAIN, root_key
from kvpool.layout import Layout
from kvpool.layouts.groups import GROUPS_MAX, Group, GroupRole
from kvpool.layouts.share import Share

SHAPE: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float16"}
FULL = Group(**SHAPE)
WINDOW = Group(kind="window", window=100, **SHAPE)
STATE = Group(kind="state", layers=3, state_bytes=1283)
HYBRID = Layout(chunk_tokens=32, groups=(FULL, WINDOW, WINDOW, STATE))


def test_one_full_group_is_a_plain_layout_with_its_keys() -> None:
    plain, grouped = Layout(chunk_tokens=32, **SHAPE), Layout(chunk_tokens=32, groups=(FULL,))
    assert grouped == plain
    assert hash(grouped) == hash(plain)
    assert grouped.to_wire() == plain.to_wire()
    assert len(plain.to_wire()) == 10
    assert grouped.fingerprint() == plain.fingerprint()
    assert plain.parts == (plain,)


def test_a_list_of_groups_is_as_good_as_a_tuple() -> None:
    assert Layout(chunk_tokens=32, groups=[FULL, STATE]) == Layout(chunk_tokens=32, groups=(FULL, STATE))  # type: ignore[arg-type]  # what a caller may write


def test_each_group_has_a_plain_layout_of_its_own_geometry() -> None:
    full, window, second, state = HYBRID.group_layouts
    assert replace(full, group=None) == Layout(chunk_tokens=32, **SHAPE)
    assert (window.group, second.group) == (GroupRole("window", 100, 0), GroupRole("window", 100, 1))
    assert (state.layers, state.layer_bytes, state.block_tokens, state.format) == (3, 1283, 32, "state")
    assert all(part.groups == () and part.of_group(0) == part for part in HYBRID.group_layouts)


def test_a_large_state_has_a_layout_where_its_bytes_have_factors() -> None:
    large = Layout(chunk_tokens=16, groups=(FULL, Group(kind="state", layers=1, state_bytes=4 << 20)))
    assert large.of_group(1).layer_bytes == 4 << 20
    with pytest.raises(
        InvalidArgument, match="group 1: group state_bytes is 67108879, expected so many that the 67108879 bytes"
    ):
        Layout(chunk_tokens=1, groups=(FULL, Group(kind="state", layers=1, state_bytes=67_108_879)))  # a prime


@pytest.mark.parametrize(
    ("size", "head_groups", "shape"),
    [(65_521 * 15, 1, (15, 65_521)), (3 * 65_521 * 5, 3, (15, 65_521)), (4 << 20, 1, (64, 65_536)), (6, 1, (1, 6))],
)
def test_a_state_without_enough_powers_of_two_is_divided_by_what_there_is(
    size: int, head_groups: int, shape: tuple[int, int]
) -> None:
    group = Group(kind="state", layers=1, state_bytes=size, head_groups=head_groups)
    state = Layout(chunk_tokens=16, groups=(FULL, group)).of_group(1)
    assert (state.kv_heads, state.head_dim) == shape
    assert (state.layer_bytes, state.head_groups) == (size, head_groups)


def test_head_groups_divide_a_state_of_any_bytes_and_tokens() -> None:
    divided = Group(kind="state", layers=2, state_bytes=6 * 700_001, head_groups=6)
    state = Layout(chunk_tokens=544, groups=(FULL, replace(divided, state_bytes=6 * 7001))).of_group(1)
    assert (state.extents, state.payload_bytes, state.extent_bytes) == (12, 7001, 8192)
    assert Share.of_rank(state, 1, 3).of_layout(state).layer_bytes == 2 * 7001
    with pytest.raises(InvalidArgument, match="the 700001 bytes of a head group"):
        Layout(chunk_tokens=544, groups=(FULL, divided))
    with pytest.raises(InvalidArgument, match="group head_groups is 5, expected a divisor of state_bytes 4200006"):
        Layout(chunk_tokens=544, groups=(FULL, replace(divided, head_groups=5)))


def test_no_two_groups_ranks_or_models_share_a_key() -> None:
    layouts = [*HYBRID.parts, Layout(chunk_tokens=32, **SHAPE), *replace(HYBRID, world=2, rank=1).parts]
    layouts += Layout(chunk_tokens=32, groups=(replace(WINDOW, window=101), STATE)).parts[:1]
    roots = {root_key(DEFAULT_DOMAIN, model="m", adapter="", salt=b"", layout=layout) for layout in layouts}
    assert len(roots) == len(layouts)


def test_the_parts_are_of_each_rank_one_group_after_the_other() -> None:
    scheduler = replace(HYBRID, rank=None, world=2)
    expected = [(part.group, rank) for part in HYBRID.group_layouts for rank in (0, 1)]
    assert [(part.group, part.rank) for part in scheduler.parts] == expected


def test_a_layout_with_groups_is_never_taken_for_that_of_a_group() -> None:
    alone = Layout(chunk_tokens=32, groups=(WINDOW,))
    assert alone.fingerprint() != alone.of_group(0).fingerprint()
    assert alone.fingerprint().endswith(alone.of_group(0).fingerprint())
    two = Layout(chunk_tokens=32, groups=(WINDOW, STATE))
    assert len({each.fingerprint() for each in (alone, two, *two.group_layouts)}) == 4


def test_the_tail_of_a_fingerprint_has_fixed_bytes() -> None:
    """A change here makes every stored chunk of a group unreachable: it is a change of the key format."""
    window = HYBRID.of_group(2)
    numbers = (0, 0, 2, 12, 1, 100, 1)  # no stages, no summaries; tag, length, kind, window, number
    expected = b"".join(number.to_bytes(4, "little") for number in numbers)
    assert window.fingerprint() == replace(window, group=None).fingerprint() + expected


@pytest.mark.parametrize(
    ("role", "chunks", "needed"),
    [
        (GroupRole("full", 0, 0), 9, 9),
        (GroupRole("window", 64, 0), 9, 2),
        (GroupRole("window", 65, 0), 9, 3),
        (GroupRole("window", 1, 0), 9, 1),
        (GroupRole("window", 1 << 20, 0), 9, 9),
        (GroupRole("state", 0, 0), 9, 1),
        (GroupRole("state", 0, 0), 0, 0),
    ],
    ids=str,
)
def test_a_role_needs_the_last_chunks_of_a_hit(role: GroupRole, chunks: int, needed: int) -> None:
    assert role.chunks_of(chunks, 32) == needed


@pytest.mark.parametrize("layout", [HYBRID, replace(HYBRID, rank=None, world=3), *HYBRID.parts], ids=str)
def test_the_wire_form_reads_back(layout: Layout) -> None:
    assert Layout.from_wire(layout.to_wire()) == layout


@pytest.mark.parametrize(
    "entries",
    [
        *(None, 0, [], [[]], [[1]], [[2, 1, 100, 0], [2, 1, 100, 0]], [[2, 3, 0, 0]], [[2, 1, 0, 0]], [[2, 0, 5, 0]]),
        *([[2, 1, 100]], [[2, True, 100, 0]], [[2, 1, 100, GROUPS_MAX]], [[2, 1, 1 << 70, 0]], [[3]], [[3, 1]]),
        *([[True, 1, 100, 0]], [[3, []]], [[3, ["full"] * 10]], [[5, 1]], [["2", 1, 100, 0]], [[3, [[]] * 10]]),
        *([[4, 2]], [[2, 1, 100, 0], [4, 2]]),
    ],
    ids=str,
)
def test_a_wire_form_with_bad_entries_is_refused(entries: object) -> None:
    for layout in (HYBRID, HYBRID.of_group(1)):
        with pytest.raises(LayoutMismatch):
            Layout.from_wire([*layout.to_wire()[:-1], entries])


def test_head_groups_of_groups_have_an_entry_of_their_own() -> None:
    """Layouts without them are sent as they were."""
    divided = replace(HYBRID, groups=(replace(FULL, head_groups=2), WINDOW, replace(WINDOW, head_groups=2), STATE))
    wire: list[Any] = HYBRID.to_wire()
    assert divided.to_wire() == [*wire[:-1], [*wire[-1], [4, 2, 1, 2, 1]]]
    assert Layout.from_wire(divided.to_wire()) == divided
    assert [part.head_groups for part in divided.group_layouts] == [2, 1, 2, 1]
    for part in divided.group_layouts:
        assert Layout.from_wire(part.to_wire()) == part
    plain, own = HYBRID.of_group(2).fingerprint(), divided.of_group(2).fingerprint()
    assert own == plain[:-20] + b"".join(number.to_bytes(4, "little") for number in (1, 4, 2)) + plain[-20:]


@pytest.mark.parametrize(
    "counts",
    [
        (),
        (2,),
        (2, 1, 1, 1, 1),
        (1, 1, 1, 1),
        (0, 2, 1, 1),
        (True, 2, 1, 1),
        (3, 1, 1, 1),
        (4, 1, 1, 1),
        (1, 1, 1, 2),
        (2, 1, 1, 3),
        "2111",
    ],
    ids=str,
)
def test_bad_head_groups_of_groups_are_refused(counts: Any) -> None:
    wire: list[Any] = HYBRID.to_wire()
    with pytest.raises(LayoutMismatch):
        Layout.from_wire([*wire[:-1], [*wire[-1], [4, *counts]]])


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("value", [None, True, 1.5, b"x", [1], -2, 1 << 70])
def test_a_wire_form_with_one_bad_field_of_a_group_is_refused(position: int, value: object) -> None:
    wire: list[Any] = HYBRID.to_wire()
    tag, first, window, *others = wire[-1][0]
    changed = [*window[:position], value, *window[position + 1 :]]
    with pytest.raises(LayoutMismatch):
        Layout.from_wire([*wire[:-1], [[tag, first, changed, *others]]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": ()}, "layers is 0"),
        ({"groups": (3,)}, "groups has 3"),
        ({"groups": "full"}, "groups is 'full'"),
        ({"groups": (FULL,) * (GROUPS_MAX + 1)}, r"expected 1\.\.64 Groups"),
        ({"layers": 2}, "layers is 2 beside groups"),
        ({"dtype": "int8"}, "dtype is 'int8' beside groups"),
        ({"summaries": "mean"}, "summaries is 'mean' beside groups"),
        ({"stages": (1, 1), "world": 2}, "stages is .* beside groups"),
        ({"rank": 1}, "rank is 1"),
        ({"groups": (FULL, replace(WINDOW, head_dim=0))}, "group 1: layout head_dim is 0"),
        ({"groups": (FULL, replace(STATE, head_groups=2))}, "head_groups is 2, expected a divisor of state_bytes 1283"),
        ({"groups": (FULL, replace(STATE, head_groups=0))}, "head_groups is 0, expected a divisor"),
    ],
    ids=str,
)
def test_a_layout_whose_groups_do_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Layout(**{"chunk_tokens": 32, "groups": (FULL, WINDOW), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sink"}, "kind is 'sink'"),
        ({"window": 5}, "window is 5 of kind 'full', expected 0"),
        ({"kind": "window"}, "window is 0 of kind 'window', expected 1"),
        ({"kind": "window", "window": True}, "window is True"),
        ({"kind": "window", "window": 8, "state_bytes": 8}, "state_bytes is 8 of kind 'window'"),
        ({"kind": "state"}, "state_bytes is 0 of kind 'state'"),
        ({"kind": "state", "state_bytes": 64}, "KV heads or blocks"),
    ],
    ids=str,
)
def test_a_group_that_does_not_fit_its_kind_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Group(**SHAPE | change)
