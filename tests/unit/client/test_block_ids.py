"""Block ids of loads and saves: what is taken, and what cannot be meant is named with its place."""

from typing import Any

import numpy as np
import pytest

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_client.copying.cache import FEW_IDS, Cache

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=32)
BLOCKS = 4 * FEW_IDS
FEW, MANY = 8, 2 * FEW_IDS


@pytest.fixture(scope="module")
def cache() -> Cache:
    return Cache([np.zeros((2, BLOCKS, 8, 1, 8), np.float16)], LAYOUT, block_tokens=8, form="kv_first")


def _ids(count: int) -> Any:
    return np.random.default_rng(count).permutation(BLOCKS)[:count]


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.uint16, np.uint64])
def test_each_block_once_is_taken_in_any_order(cache: Cache, count: int, kind: Any) -> None:
    ids = _ids(count)
    given = kind(ids.tolist()) if kind in (list, tuple) else ids.astype(kind)
    for may_skip in (False, True):
        assert cache.checked_block_ids(given, count // 4, may_skip=may_skip).tolist() == ids.tolist()
    assert len(cache.checked_block_ids([], 0, may_skip=False)) == 0


def test_checked_ids_stay_as_they_were_when_the_engine_changes_its_table(cache: Cache) -> None:
    table = _ids(FEW)
    before = table.tolist()
    found = cache.checked_block_ids(table, FEW // 4, may_skip=False)
    table[:] = 0
    assert found.tolist() == before


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("skipped", [1, 3, None])
def test_a_load_leaves_out_any_number_of_blocks(cache: Cache, count: int, skipped: int | None) -> None:
    ids = _ids(count)
    ids[:skipped] = -1
    assert cache.checked_block_ids(ids, count // 4, may_skip=True).tolist() == ids.tolist()
    with pytest.raises(InvalidArgument, match=rf"block_ids\[0\] is -1, expected 0\.\.{BLOCKS - 1}$"):
        cache.checked_block_ids(ids, count // 4, may_skip=False)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("place", [1, 5, -1])
def test_a_block_that_is_there_twice_is_refused_with_both_places(
    cache: Cache, count: int, skips: bool, place: int
) -> None:
    """Of a load the second chunk would overwrite the first, and a save would store the same KV for both."""
    ids = _ids(count)
    ids[place] = ids[0]
    if skips:
        ids[3] = -1
    named = rf"block_ids\[0\] and block_ids\[{place % count}\] are both {ids[0]}, expected a block of its own"
    with pytest.raises(InvalidArgument, match=named):
        cache.checked_block_ids(ids, count // 4, may_skip=skips)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("wrong", [-1, BLOCKS])
def test_blocks_may_repeat_where_that_is_allowed_and_have_to_be_there(cache: Cache, count: int, wrong: int) -> None:
    ids = _ids(count)
    ids[1:4] = ids[0]
    assert cache.checked_block_ids(ids, count // 4, may_skip=False, may_repeat=True).tolist() == ids.tolist()
    ids[5] = wrong
    with pytest.raises(InvalidArgument, match=rf"block_ids\[5\] is {wrong}, expected 0\.\.{BLOCKS - 1}$"):
        cache.checked_block_ids(ids, count // 4, may_skip=False, may_repeat=True)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("block", [-2, BLOCKS, 1 << 40])
def test_a_block_that_is_not_there_is_named(cache: Cache, count: int, block: int) -> None:
    ids = _ids(count)
    ids[5] = block
    with pytest.raises(
        InvalidArgument, match=rf"block_ids\[5\] is {block}, expected 0\.\.{BLOCKS - 1}, or −1 to leave"
    ):
        cache.checked_block_ids(ids, count // 4, may_skip=True)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([0.0, 1.0, 2.0, 3.0], "float64, expected one dimension of integers$"),
        ([0, 1, 2, 3.5], "float64, expected one dimension of integers$"),
        ([True, False, True, False], "bool, expected one dimension of integers$"),
        ([[0, 1, 2, 3]], r"shape \(1, 4\) of int64, expected one dimension of integers: pass block_ids\[0\]$"),
        ([[0, 1], [2, 3]], r"shape \(2, 2\) of int64, expected one dimension of integers$"),
        (np.array([0, 1, 2, 2**64 - 1], np.uint64), "reach to 18446744073709551615, expected the numbers of blocks"),
        ([0, 1, 2], "has 3 ids, expected 4 for 1 chunks of 4 blocks"),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(cache: Cache, ids: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        cache.checked_block_ids(ids, 1, may_skip=True)
