"""Head groups of a layout, and shares of a chunk: sizes, fixed bytes, refusals by name, and which extents a rank has."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import EXTENT_ALIGN_BYTES, EXTENTS_MAX, Layout
from kvpool.layouts.share import Share

PLAIN = Layout(layers=4, kv_heads=8, head_dim=128, chunk_tokens=64)
GROUPED = replace(PLAIN, head_groups=8)
TINY = Layout(layers=3, kv_heads=4, head_dim=2, dtype="float16", chunk_tokens=16, head_groups=4)


def test_an_extent_is_a_head_group_of_a_layer() -> None:
    assert (GROUPED.extents, GROUPED.kv_extents) == (32, 32)
    assert GROUPED.payload_bytes == GROUPED.extent_bytes == PLAIN.layer_bytes // 8 == 32 << 10
    assert (GROUPED.chunk_bytes, GROUPED.stored_bytes) == (PLAIN.chunk_bytes, PLAIN.stored_bytes)
    assert (GROUPED.layer_bytes, GROUPED.token_plane_bytes) == (PLAIN.layer_bytes, PLAIN.token_plane_bytes)


def test_a_head_group_begins_at_a_whole_page_and_a_plain_layer_where_it_always_did() -> None:
    assert (TINY.payload_bytes, TINY.extent_bytes, TINY.stored_bytes) == (128, EXTENT_ALIGN_BYTES, 12 * 4096)
    plain = replace(TINY, head_groups=1)
    assert (plain.payload_bytes, plain.extent_bytes, plain.stored_bytes) == (512, 512, 3 * 512)
    assert plain.chunk_bytes == TINY.chunk_bytes


def test_the_fingerprint_with_head_groups_has_fixed_bytes() -> None:
    """Behind the number of stages and the form of the summaries, which are there and empty."""
    entry = b"".join(number.to_bytes(4, "little") for number in (1, 4, 8))
    assert GROUPED.fingerprint() == PLAIN.fingerprint() + bytes(4) + bytes(4) + entry
    staged = replace(PLAIN, rank=1, world=2, stages=(2, 4))
    assert replace(staged, head_groups=8).fingerprint() == staged.fingerprint() + bytes(4) + entry


def test_the_wire_form_with_head_groups_has_fixed_fields() -> None:
    assert GROUPED.to_wire() == [*PLAIN.to_wire(), [], "", [[1, 8]]]
    assert Layout.from_wire(GROUPED.to_wire()) == GROUPED
    staged = replace(GROUPED, rank=None, world=2, stages=(2, 4))
    assert Layout.from_wire(staged.to_wire()) == staged


@pytest.mark.parametrize(
    "entries",
    [
        *(None, [], [[]], [[1]], [1, 8], {"1": 8}, [[1, 8], [1, 8]], [[1, 8, 8]]),
        *([[1, 1]], [[1, True]], [[1, "8"]], [[2, 8]], [[True, 8]], [[1, 3]], [[1, 0]], [[1, -8]], [[1, 1 << 40]]),
    ],
    ids=str,
)
def test_a_wire_form_with_bad_entries_is_refused(entries: object) -> None:
    with pytest.raises(LayoutMismatch):
        Layout.from_wire([*PLAIN.to_wire(), [], "", entries])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_groups": 3}, "head_groups is 3, expected a divisor of kv_heads 8"),
        ({"head_groups": 16}, "head_groups is 16, expected an integer 1..8"),
        ({"head_groups": 2.0}, "head_groups is 2.0"),
        ({"summaries": "mean"}, "head_groups is 8 with summaries 'mean', expected 1: a summary is made of all heads"),
        ({"layers": 513}, f"head_groups is 8, expected at most {EXTENTS_MAX // 513} with 513 layers"),
    ],
)
def test_head_groups_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        replace(GROUPED, **change)
    assert message in str(refusal.value)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_of_an_engine_have_all_extents_between_them(size: int) -> None:
    shares = [Share.of_rank(GROUPED, rank, size) for rank in range(size)]
    assert sorted(chain.from_iterable(share.extents(GROUPED) for share in shares)) == list(range(32))
    for rank, share in enumerate(shares):
        share.check(GROUPED)
        assert (share.groups, share.first_group) == (8 // size, rank * 8 // size)
        own = share.of_layout(GROUPED)
        assert (own.kv_heads, own.chunk_bytes) == (8 // size, GROUPED.chunk_bytes // size)
        assert (own.kv_extents, own.payload_bytes) == (len(share.extents(GROUPED)), GROUPED.payload_bytes)
        assert list(share.extents(GROUPED)) == sorted(share.extents(GROUPED))
    assert shares[0].is_whole(GROUPED) == (size == 1)


def test_ranks_beyond_the_groups_have_the_same_ones() -> None:
    layout = replace(GROUPED, head_groups=2)
    assert [Share.of_rank(layout, rank, 8).first_group for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert Share.of_rank(replace(PLAIN, kv_heads=1), 5, 8) == Share.whole(replace(PLAIN, kv_heads=1))


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [
        *[(rank, size, "below the size") for rank, size in ((8, 8), (-1, 2), (0, 0))],
        *[(0, size, "ranks that 8 head groups can be divided for") for size in (3, 12)],
    ],
)
def test_a_rank_for_which_the_groups_cannot_be_divided_is_refused(rank: int, size: int, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=f"rank is {rank} of {size}, expected .*{expected}"):
        Share.of_rank(GROUPED, rank, size)


def test_a_stage_has_extents_of_its_layers() -> None:
    assert Share(1, 2, 6, 2).extents(GROUPED) == (14, 15, 22, 23)
    assert Share(2, 2).extents(PLAIN) == (2, 3)
    assert (
        Share.whole(replace(PLAIN, rank=None, world=2, stages=(1, 4))).of_layout(
            replace(PLAIN, rank=None, world=2, stages=(1, 4))
        )
        == PLAIN
    )


@pytest.mark.parametrize(
    "share", [Share(0, 5), Share(-1, 1), Share(0, 0), Share(4, 1), Share(0, 1, 0, 2), Share(0, 1, 1)]
)
def test_a_share_outside_the_layout_is_refused(share: Share) -> None:
    with pytest.raises(InvalidArgument, match=r"share is .* expected some of the layout's"):
        share.check(PLAIN)


def test_a_share_is_of_integers() -> None:
    with pytest.raises(InvalidArgument, match="expected integers"):
        Share(0, True).check(PLAIN)
    with pytest.raises(InvalidArgument, match="expected integers"):
        Share(0, 1, "0").check(PLAIN)  # type: ignore[arg-type]
