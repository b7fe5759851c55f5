"""Layouts: sizes, refusals by name, fingerprints that differ wherever bytes differ, and the wire form."""

from dataclasses import fields, replace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import CHUNK_BYTES_MAX, ITEM_BYTES, STAGES_MAX, Layout

PLAIN = Layout(layers=32, kv_heads=8, head_dim=128)
STAGED = Layout(layers=3, kv_heads=8, head_dim=128, rank=None, world=6, stages=(3, 1, 2))
PACKED = Layout(layers=4, kv_heads=2, head_dim=64, format="vllm-fp8", block_tokens=16, rank=1, world=2)


def test_sizes_multiply_up() -> None:
    assert PLAIN.token_plane_bytes == 8 * 128 * 2
    assert PLAIN.layer_bytes == 2 * 256 * PLAIN.token_plane_bytes
    assert PLAIN.chunk_bytes == 32 << 20


@pytest.mark.parametrize(("dtype", "item_bytes"), ITEM_BYTES.items())
def test_every_dtype_has_its_size(dtype: str, item_bytes: int) -> None:
    assert Layout(layers=1, kv_heads=1, head_dim=1, dtype=dtype).token_plane_bytes == item_bytes


def test_one_plane_halves_a_chunk() -> None:
    assert 2 * replace(PLAIN, planes=1).chunk_bytes == PLAIN.chunk_bytes


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
    ],
    ids=str,
)
def test_each_field_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(PACKED, **change).fingerprint() != PACKED.fingerprint()


def test_no_field_is_left_out_of_the_fingerprint_cases() -> None:
    assert {field.name for field in fields(Layout)} == {
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
    }


def test_the_fingerprint_has_fixed_bytes() -> None:
    """A change here makes every stored chunk unreachable: it is a change of the key format."""
    numbers = (1, 32, 8, 128, 256, 2, 0, 1, 0)
    expected = b"".join(number.to_bytes(4, "little") for number in numbers)
    assert PLAIN.fingerprint() == expected + b"\x08\x00\x00\x00bfloat16" + bytes(4)


@pytest.mark.parametrize(
    "layout",
    [PLAIN, PACKED, replace(PLAIN, rank=None, world=4), STAGED, STAGED.for_rank(3)],
    ids=["plain", "packed", "all", "stages", "stage"],
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


@pytest.mark.parametrize("wire", [None, [], (1,) * 10, [1] * 9, [1] * 11, [1] * 12, {"layers": 1}, b"0123456789"])
def test_a_wire_form_that_is_no_list_of_ten_is_refused(wire: object) -> None:
    with pytest.raises(LayoutMismatch):
        Layout.from_wire(wire)
