"""Block pools, prefix caches and sparse sequences refuse Pools whose chunks they have not: groups, other layers or dtypes."""

from collections.abc import Callable
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.sparse import SparseConfig, SparseSequence
from tests.rigs.fake_pool import AWAY

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.blocks import BlockPool  # noqa: E402 - only where torch is there
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
