"""Head groups in engine memory: random shapes, forms and shares, copied as numpy alone would; and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool_client.copying.cache import Cache
from tests.rigs.rank_memory import FORMS, RankMemory, kv_of, part_of

CASES = 60
LAYOUT = kv.Layout(layers=2, kv_heads=4, head_dim=4, dtype="float16", chunk_tokens=16, head_groups=2)
PACKED = replace(LAYOUT, format="x", block_tokens=8)


def _contiguous(items: npt.NDArray[np.uint16], groups: int) -> npt.NDArray[np.uint8]:
    """KV [layer, plane, token, head, dim] as extents of so many head groups, one behind the other."""
    layers, planes, tokens, heads, dim = items.shape
    apart = items.reshape(layers, planes, tokens, groups, heads // groups, dim).transpose(0, 3, 1, 2, 4, 5)
    return np.array(apart, order="C").view(np.uint8).reshape(-1)


def _any_case(chance: np.random.Generator, memory: str) -> tuple[kv.Layout, kv.Share, int]:
    """A layout, a share of it, and the tokens of a block; head-major memory has one head a group."""
    groups = int(chance.choice([2, 3, 4, 8]))
    heads = groups if memory in ("head_major", "joint_planes") else groups * int(chance.integers(1, 4))
    block_tokens = int(chance.choice([1, 2, 8]))
    layout = kv.Layout(
        layers=int(chance.integers(1, 4)),
        kv_heads=heads,
        head_dim=int(chance.integers(1, 40)),
        dtype="float16",
        chunk_tokens=block_tokens * int(chance.integers(1, 4)),
        head_groups=groups,
    )
    layers, count = int(chance.integers(1, layout.layers + 1)), int(chance.integers(1, groups + 1))
    first, first_group = (
        int(chance.integers(0, layout.layers - layers + 1)),
        int(chance.integers(0, groups - count + 1)),
    )
    return layout, kv.Share(first, layers, first_group, count), block_tokens


@pytest.mark.parametrize("memory", FORMS)
def test_any_share_in_any_memory_is_gathered_and_scattered_as_numpy_would(memory: str) -> None:
    chance = np.random.default_rng(7)
    for _ in range(CASES):
        layout, share, block_tokens = _any_case(chance, memory)
        mine = RankMemory(layout, share, blocks=7, block_tokens=block_tokens, memory=memory)
        cache = Cache(mine.arrays, layout, block_tokens=block_tokens, form=mine.form, share=share)
        row = np.frombuffer(chance.bytes(layout.chunk_bytes), np.uint8)
        items = part_of(kv_of(row, layout), layout, share)
        ids = chance.permutation(7)[: cache.blocks_per_chunk].astype(np.int64)
        expected = _contiguous(items, share.groups)
        assert cache.view is not None
        kvpool_native.scatter_plain(cache.view, ids.tobytes(), len(ids), expected)
        assert np.array_equal(mine.chunk(ids.tolist()), items), (layout, share)
        mine.fill(ids.tolist(), items[:, :, ::-1])
        found = np.zeros_like(expected)
        kvpool_native.gather_plain(cache.view, ids.tobytes(), len(ids), found)
        assert np.array_equal(found, _contiguous(items[:, :, ::-1], share.groups)), (layout, share)


@pytest.mark.parametrize("heads_axis", [4, 2])
def test_a_packed_block_has_its_groups_one_behind_the_other(heads_axis: int) -> None:
    arrays = [np.arange(3 * 512, dtype=np.uint8).reshape(3, heads_axis, -1) + layer for layer in range(2)]
    cache = Cache(arrays, PACKED, block_tokens=8, form="packed")
    assert (cache.geometry.plane_block_bytes, cache.geometry.runs) == (256, 1)
    found = np.zeros(4 * 512, np.uint8)
    kvpool_native.gather_plain(cache.view, np.array([2, 0]).tobytes(), 2, found)
    halves = [arrays[layer].reshape(3, 2, 256)[[2, 0], group] for layer in range(2) for group in range(2)]
    assert np.array_equal(found, np.concatenate(halves).reshape(-1))


def test_one_plane_has_head_groups_too() -> None:
    layout = replace(LAYOUT, planes=1)
    arrays = [np.arange(5 * 8 * 16, dtype=np.uint16).reshape(5, 8, 4, 4) + 1000 * layer for layer in range(2)]
    cache = Cache(arrays, layout, block_tokens=8, form="kv_first")
    found = np.zeros(layout.chunk_bytes, np.uint8)
    kvpool_native.gather_plain(cache.view, np.array([4, 1]).tobytes(), 2, found)
    items = np.array([array[[4, 1]].reshape(1, 16, 4, 4) for array in arrays])
    assert np.array_equal(found, _contiguous(items, 2))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (np.zeros((2, 5, 4, 8, 4), np.uint16).transpose(0, 1, 3, 2, 4), "expected one head a group"),
        (np.zeros((2, 5, 8, 4, 8), np.uint16)[..., ::2], "no 2 groups without gaps"),
        (np.lib.stride_tricks.as_strided(np.zeros(640, np.uint16), (2, 5, 8, 4, 4), (512, 128, 32, 8, 2)), "overlap"),
    ],
    ids=["heads apart", "gaps in a head", "blocks overlap"],
)
def test_memory_in_which_a_group_is_no_runs_is_refused(arrays: Any, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        Cache([arrays, arrays], LAYOUT, block_tokens=8, form="kv_first")


def test_as_many_arrays_and_heads_as_the_share_has_are_registered() -> None:
    share = kv.Share(1, 1, 1, 1)
    one = np.zeros((2, 5, 8, 2, 4), np.uint16)
    assert len(Cache([one], LAYOUT, block_tokens=8, form="auto", share=share).geometry.addresses) == 1
    with pytest.raises(LayoutMismatch, match="2 layers are registered, the layout has 1"):
        Cache([one, one], LAYOUT, block_tokens=8, form="auto", share=share)
    with pytest.raises(LayoutMismatch, match="does not fit"):
        Cache([np.zeros((2, 5, 8, 4, 4), np.uint16)], LAYOUT, block_tokens=8, form="auto", share=share)
