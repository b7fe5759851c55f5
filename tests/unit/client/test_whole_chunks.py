"""Block pools, prefix caches and sparse sequences refuse Pools whose chunks they have not: groups, other layers or dtypes."""

from collections.abc import Callable
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_sparse import SparseConfig, SparseSequence
from tests.rigs.fake_pool import AWAY

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import BlockPool  # noqa: E402 - only where torch is there
from kvpool_client.torch import PagedPrefixCache  # noqa: E402
from tests.rigs.blocks.executor import manager_of  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS, HEADS, DIM, BLOCK = 2, 2, 32, 4
SHAPE: dict[str, Any] = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "bfloat16"}
PLAIN = kv.Layout(**SHAPE, chunk_tokens=8)
DEEP = kv.Layout(**{**SHAPE, "layers": 2 * LAYERS}, chunk_tokens=8)
GROUPED = kv.Layout(chunk_tokens=8, groups=(kv.Group(**SHAPE), kv.Group(kind="window", window=8, **SHAPE)))


def block_pool(pool: kv.Pool, dtype: str) -> None:
    BlockPool(
        layers=LAYERS,
        num_blocks=4,
        tokens_per_block=BLOCK,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        device="cpu",
        pool=pool,
    ).close()


def kv_cache_manager(pool: kv.Pool, dtype: str) -> None:
    manager_of(16, BLOCK, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype, pool=pool).shutdown()


def prefix_cache(pool: kv.Pool, dtype: str) -> None:
    shape = (4, 2, BLOCK, HEADS, DIM)
    PagedPrefixCache(pool, [torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(LAYERS)], BLOCK)


def sparse_sequence(pool: kv.Pool, dtype: str) -> None:
    with SparseSequence(pool, SparseConfig(block_tokens=BLOCK, init_tokens=BLOCK)) as sequence:
        rows = torch.zeros(1, HEADS, DIM, dtype=getattr(torch, dtype))
        sequence.append(0, rows, rows)


Make = Callable[[kv.Pool, str], None]
ALL: list[Make] = [block_pool, kv_cache_manager, prefix_cache, sparse_sequence]


@pytest.mark.parametrize("make", ALL)
def test_a_pool_of_its_geometry_is_taken_and_one_of_another_dtype_is_not(make: Make) -> None:
    with kv.connect(AWAY, model="m", layout=PLAIN) as pool:
        make(pool, "bfloat16")
        with pytest.raises((kv.LayoutMismatch, kv.InvalidArgument), match=r"float16, expected the layout's bfloat16"):
            make(pool, "float16")


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("heads", "dim"), [(DIM, HEADS), (2 * HEADS, DIM // 2)])
def test_a_pool_of_other_heads_with_as_many_bytes_is_refused(make: Make, heads: int, dim: int) -> None:
    layout = kv.Layout(**{**SHAPE, "kv_heads": heads, "head_dim": dim}, chunk_tokens=8)
    with (
        kv.connect(AWAY, model="m", layout=layout) as pool,
        pytest.raises((kv.LayoutMismatch, kv.InvalidArgument), match=f"expected {heads} heads of {dim} items|head_dim"),
    ):
        make(pool, "bfloat16")


@pytest.mark.parametrize("make", ALL)
def test_a_pool_with_groups_is_refused(make: Make) -> None:
    with (
        kv.connect(AWAY, model="m", layout=GROUPED) as pool,
        pytest.raises(kv.InvalidArgument, match="the layout of pool has 2 groups, expected one without groups"),
    ):
        make(pool, "bfloat16")


@pytest.mark.parametrize("make", ALL)
def test_a_pool_of_one_stage_is_taken_by_who_has_its_layers(make: Make) -> None:
    with kv.connect(AWAY, model="m", layout=DEEP, share=kv.Share(LAYERS, LAYERS, 0, 1)) as pool:
        if make is sparse_sequence:
            with pytest.raises(kv.InvalidArgument, match=r"the share of pool is Share.*expected a Pool without share"):
                make(pool, "bfloat16")
        else:
            make(pool, "bfloat16")


@pytest.mark.parametrize("make", [block_pool, kv_cache_manager, prefix_cache])
def test_a_pool_of_more_layers_is_refused(make: Make) -> None:
    with kv.connect(AWAY, model="m", layout=DEEP) as pool, pytest.raises(kv.LayoutMismatch, match="2 layers"):
        make(pool, "bfloat16")


def test_blocks_without_a_named_geometry_have_that_of_the_pools_layout_and_a_named_one_must_be_its() -> None:
    with kv.connect(AWAY, model="m", layout=PLAIN) as pool:
        for named in ({}, {"kv_heads": HEADS}, {"dtype": torch.bfloat16}, SHAPE):
            geometry: dict[str, Any] = named
            blocks = BlockPool(num_blocks=3, tokens_per_block=BLOCK, device="cpu", pool=pool, **geometry)
            layers = [blocks.buffers(layer) for layer in range(blocks.shape.layers)]
            assert len(layers) == LAYERS
            assert {(tuple(layer.shape), layer.dtype) for layer in layers} == {
                ((3, 2, BLOCK, HEADS, DIM), torch.bfloat16)
            }
            blocks.close()
        other: dict[str, Any] = {"layers": 3}
        with pytest.raises(kv.LayoutMismatch, match="3 layers"):
            BlockPool(num_blocks=3, tokens_per_block=BLOCK, device="cpu", pool=pool, **other)


def test_blocks_of_a_rank_with_a_share_have_the_shares_geometry() -> None:
    wide = kv.Layout(**{**SHAPE, "layers": 5, "kv_heads": 4}, chunk_tokens=8, head_groups=2)
    with kv.connect(AWAY, model="m", layout=wide, share=kv.Share(1, 3, 1, 1)) as pool:
        blocks = BlockPool(num_blocks=3, tokens_per_block=BLOCK, device="cpu", pool=pool)
        shape = blocks.shape
        assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (3, 2, DIM, "bfloat16")
        blocks.close()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (GROUPED, "the layout of pool has 2 groups, expected one without groups"),
        (kv.Layout(LAYERS, 1, DIM, "bfloat16", 8, planes=1), r"shape \(3, 2, 4, 1, 32\)"),
    ],
    ids=["groups", "one plane"],
)
def test_a_layout_that_no_block_pool_has_is_refused_with_a_geometry_and_without(layout: kv.Layout, words: str) -> None:
    with kv.connect(AWAY, model="m", layout=layout) as pool:
        for named in ({}, {"layers": LAYERS, "kv_heads": 1, "head_dim": DIM, "dtype": "bfloat16"}):
            geometry: dict[str, Any] = named
            with pytest.raises(kv.KVPoolError, match=words):
                BlockPool(num_blocks=3, tokens_per_block=BLOCK, device="cpu", pool=pool, **geometry)
