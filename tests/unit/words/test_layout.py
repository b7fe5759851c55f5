"""Layouts: sizes, refusals by name, fingerprints that differ wherever bytes differ, and the wire form."""

from dataclasses import fields, replace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import CHUNK_BYTES_MAX, ITEM_BYTES, STAGES_MAX, Layout
from kvpool.layouts.groups import GroupRole

PLAIN = Layout(layers=32, kv_heads=8, head_dim=128)
STAGED = Layout(layers=3, kv_heads=8, head_dim=128, rank=None, world=6, stages=(3, 1, 2))
SUMMARIZED = replace(PLAIN, summaries="clusters7")
PACKED = Layout(layers=4, kv_heads=2, head_dim=64, format="vllm-fp8", block_tokens=16, rank=1, world=2)


@pytest.mark.parametrize(("dtype", "item_bytes"), ITEM_BYTES.items())
def test_every_dtype_has_its_size(dtype: str, item_bytes: int) -> None:
    assert Layout(layers=1, kv_heads=1, head_dim=1, dtype=dtype).token_plane_bytes == item_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", 1025),
        ("layers", True),
        ("layers", 2.0),
        ("kv_heads", -1),
        ("head_dim", "128"),
        ("chunk_tokens", 0),
        ("planes", 3),
        ("world", 0),
        ("dtype", "float12"),
        ("rank", 1),
        ("rank", -1),
        ("rank", False),
        ("format", "named"),
        ("format", 7),
        ("block_tokens", 0),
        ("block_tokens", 48),
        ("block_tokens", 512),
        ("head_groups", 0),
        ("head_groups", 2),
        ("head_groups", True),
    ],
)
def test_a_field_out_of_range_is_refused_by_name_and_value(field: str, value: object) -> None:
    arguments: dict[str, Any] = {"layers": 2, "kv_heads": 1, "head_dim": 8, field: value}
    with pytest.raises(InvalidArgument) as refusal:
        Layout(**arguments)
    assert f"layout {field} is {value!r}" in str(refusal.value)


def test_a_format_name_is_bounded_in_bytes() -> None:
    Layout(layers=1, kv_heads=1, head_dim=1, format="é" * 128, block_tokens=16)
    with pytest.raises(InvalidArgument):
        Layout(layers=1, kv_heads=1, head_dim=1, format="é" * 129, block_tokens=16)


def test_a_chunk_has_a_greatest_size() -> None:
    largest = Layout(layers=1, kv_heads=1 << 11, head_dim=1 << 11, dtype="uint8", chunk_tokens=512)
    assert largest.chunk_bytes == CHUNK_BYTES_MAX
    with pytest.raises(InvalidArgument, match="makes chunks of"):
        replace(largest, layers=2)


def test_a_scheduler_has_the_layout_of_every_rank() -> None:
    scheduler = Layout(layers=1, kv_heads=1, head_dim=1, rank=None, world=3)
    assert scheduler.ranks == (0, 1, 2)
    assert scheduler.for_rank(2).ranks == (2,)
    with pytest.raises(AssertionError):
        scheduler.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 5},
        {"kv_heads": 3},
        {"head_dim": 65},
        {"dtype": "float16"},
        {"chunk_tokens": 512},
        {"planes": 1},
        {"rank": 0},
        {"world": 3},
        {"format": "vllm-fp8-b"},
        {"block_tokens": 32},
        {"format": "", "block_tokens": None},
        {"stages": (4, 4)},
        {"format": "", "block_tokens": None, "summaries": "mean"},
        {"head_groups": 2},
        {"group": GroupRole("window", 64, 0)},
    ],
    ids=str,
)
def test_each_field_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(PACKED, **change).fingerprint() != PACKED.fingerprint()


def test_no_field_is_left_out_of_the_fingerprint_cases() -> None:
    assert {field.name for field in fields(Layout) if field.init} == {
        "layers",
        "kv_heads",
        "head_dim",
        "dtype",
        "chunk_tokens",
        "planes",
        "rank",
        "world",
        "format",
        "block_tokens",
        "stages",
        "summaries",
        "head_groups",
        "groups",  # never of a layout with a fingerprint of its own
        "group",
    }


def test_the_fingerprint_has_fixed_bytes() -> None:
    """A change here makes every stored chunk unreachable: it is a change of the key format."""
    numbers = (1, 32, 8, 128, 256, 2, 0, 1, 0)
    expected = b"".join(number.to_bytes(4, "little") for number in numbers)
    assert PLAIN.fingerprint() == expected + b"\x08\x00\x00\x00bfloat16" + bytes(4)


@pytest.mark.parametrize(
    "layout",
    [
        *(PLAIN, PACKED, replace(PLAIN, rank=None, world=4), STAGED, STAGED.for_rank(3), SUMMARIZED),
        *(replace(layout, summaries="mean") for layout in (STAGED, STAGED.for_rank(3))),
    ],
    ids=["plain", "packed", "all", "stages", "stage", "summaries", "summaries-stages", "summaries-stage"],
)
def test_the_wire_form_reads_back(layout: Layout) -> None:
    assert Layout.from_wire(layout.to_wire()) == layout


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("value", [None, True, 1.5, b"x", [1], -2, 1 << 70])
def test_a_wire_form_with_one_bad_field_is_refused(position: int, value: object) -> None:
    wire: list[object] = list(PACKED.to_wire())
    wire[position] = value
    with pytest.raises(LayoutMismatch):
        Layout.from_wire(wire)


@pytest.mark.parametrize(
    "stages",
    [
        None,
        0,
        "12",
        [],
        [4],
        [4, 0],
        [4, True],
        [4, -1],
        [4, 1 << 70],
        [4, [4]],
        [4] * (STAGES_MAX + 1),
        [4, 4, 4],
        [5, 4],
    ],
    ids=str,
)
def test_a_wire_form_with_bad_stages_is_refused(stages: object) -> None:
    wire = replace(PACKED, rank=1, world=2, stages=(4, 4)).to_wire()
    assert Layout.from_wire(wire).stages == (4, 4)
    for rank in (-1, 0):
        with pytest.raises(LayoutMismatch):
            Layout.from_wire([*wire[:6], rank, *wire[7:-1], stages])


def test_stages_have_layers_of_their_own() -> None:
    assert [STAGED.for_rank(rank).layers for rank in STAGED.ranks] == [3, 3, 1, 1, 2, 2]
    assert STAGED.for_rank(2).chunk_bytes * 3 == STAGED.chunk_bytes == STAGED.for_rank(0).chunk_bytes
    assert STAGED.for_rank(4).for_rank(0) == STAGED.for_rank(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, "layers is 2 of rank None, expected 3"),
        ({"rank": 5}, "layers is 3 of rank 5, expected 2"),
        ({"world": 4}, "world is 4, expected a multiple of its 3"),
        ({"stages": (3,)}, r"stages is \(3,\), expected a tuple of 2"),
        ({"stages": [3, 1, 2]}, r"stages is \[3, 1, 2\], expected a tuple"),
        ({"stages": (3, 0, 2)}, "stages is 0"),
    ],
    ids=str,
)
def test_stages_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(STAGED, **change)


def test_equal_numbers_of_other_layers_are_different_chunks() -> None:
    """Rank 2 has layers 2 and 3 of the one, 3 and 4 of the other."""
    one, other = (
        replace(PLAIN, layers=2, world=4, rank=None, stages=stages) for stages in ((1, 1, 2, 2), (1, 2, 2, 1))
    )
    assert one.for_rank(2).fingerprint() != other.for_rank(2).fingerprint()
    assert one.for_rank(2).layers == other.for_rank(2).layers


@pytest.mark.parametrize(
    "wire", [None, [], (1,) * 10, [1] * 9, [1] * 11, [1] * 12, [1] * 13, {"layers": 1}, b"0123456789"]
)
def test_a_wire_form_that_is_no_list_of_ten_is_refused(wire: object) -> None:
    with pytest.raises(LayoutMismatch):
        Layout.from_wire(wire)


def test_the_fingerprint_with_summaries_has_fixed_bytes() -> None:
    """Behind the number of stages, which is 0 without any: no stages are taken for summaries, nor the other way round."""
    assert SUMMARIZED.fingerprint() == PLAIN.fingerprint() + bytes(4) + b"\x09\x00\x00\x00clusters7"
    staged = replace(STAGED.for_rank(4), summaries="mean")
    assert staged.fingerprint() == STAGED.for_rank(4).fingerprint() + b"\x04\x00\x00\x00mean"
    ending = b"".join(number.to_bytes(4, "little") for number in (3, 3, 1, 2))
    assert staged.fingerprint().endswith(ending + b"\x04\x00\x00\x00mean")


def test_the_wire_form_with_summaries_has_fixed_fields() -> None:
    assert SUMMARIZED.to_wire() == [32, 8, 128, "bfloat16", 256, 2, 0, 1, "", 0, [], "clusters7"]
    assert replace(STAGED, summaries="mean").to_wire()[10:] == [[3, 1, 2], "mean"]


@pytest.mark.parametrize(
    "later", [[[]], [[], ""], [[], None], [[], b"mean"], [[], "means"], [None, "mean"], ["mean", []]]
)
def test_a_wire_form_with_bad_summaries_is_refused(later: list[object]) -> None:
    assert Layout.from_wire([*PLAIN.to_wire(), [], "mean"]).summaries == "mean"
    with pytest.raises(LayoutMismatch):
        Layout.from_wire([*PLAIN.to_wire(), *later])


@pytest.mark.parametrize(
    ("form", "head_dim", "size"),
    [("clusters7", 128, 1677), ("clusters7", 64, 849), ("clusters7", 256, 3333), ("mean", 128, 256), ("mean", 32, 64)],
)
def test_a_summary_has_its_size(form: str, head_dim: int, size: int) -> None:
    assert replace(PLAIN, summaries=form, head_dim=head_dim).summary_bytes == size
    assert replace(PLAIN, head_dim=head_dim).summary_bytes == 0


@pytest.mark.parametrize(("chunk_tokens", "block_tokens"), [(256, 128), (128, 128), (64, 64), (96, 32), (16, 16)])
def test_summaries_fill_extents_behind_the_layers(chunk_tokens: int, block_tokens: int) -> None:
    layout = replace(SUMMARIZED, chunk_tokens=chunk_tokens)
    assert layout.summary_block_tokens == block_tokens
    needed = 32 * (chunk_tokens // block_tokens) * 8 * 1677
    assert (layout.summary_extents - 1) * layout.layer_bytes < needed <= layout.summary_extents * layout.layer_bytes
    assert (layout.extents, layout.layers) == (32 + layout.summary_extents, 32)
    assert layout.stored_bytes == layout.extents * layout.layer_bytes
    assert layout.chunk_bytes == replace(layout, summaries="").chunk_bytes == 32 * layout.layer_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"summaries": "clusters"}, "summaries is 'clusters', expected one of mean, clusters7"),
        ({"summaries": None}, "summaries is None"),
        ({"planes": 1}, "planes is 1 with summaries 'clusters7', expected 2"),
        ({"format": "vllm", "block_tokens": 16}, "block_tokens is 16 with summaries 'clusters7', expected None"),
        ({"block_tokens": 16}, "block_tokens is 16 with summaries"),
        ({"dtype": "float8_e5m2"}, "dtype is 'float8_e5m2' with summaries 'clusters7', expected one of float32"),
        ({"head_dim": 80}, "head_dim is 80 with summaries 'clusters7', expected a multiple of 32, at most 256"),
        ({"head_dim": 288}, "head_dim is 288 with summaries"),
        ({"kv_heads": 1025, "head_dim": 32}, "kv_heads is 1025 with summaries 'clusters7', expected at most 1024"),
        ({"chunk_tokens": 24}, "chunk_tokens is 24 with summaries 'clusters7', expected a multiple of 16"),
        ({"layers": 1024}, "layers is 1024 with summaries 'clusters7', expected 1024 at most with the 27 behind them"),
    ],
    ids=str,
)
def test_summaries_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(SUMMARIZED, **change)


def test_the_greatest_size_is_that_of_what_is_stored() -> None:
    largest = Layout(layers=128, kv_heads=1 << 6, head_dim=256, dtype="float16", chunk_tokens=512)
    assert largest.chunk_bytes == CHUNK_BYTES_MAX
    with pytest.raises(InvalidArgument, match="makes chunks of"):
        replace(largest, summaries="clusters7")
