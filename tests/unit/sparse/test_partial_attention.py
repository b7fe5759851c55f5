"""Attention over parts of a sequence, merged: what it is over all of it, whatever is in the parts."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from kvpool_sparse.device.partial_attention import (  # noqa: E402
    TOKENS_AT_ONCE,
    attend_blocks,
    attend_tokens,
    merged,
    no_part,
    scaled_query,
)

Tensor = Any
KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 3, 32, 16


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def exact(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    logits = query.double() @ keys.double().transpose(1, 2)
    return (torch.softmax(logits, dim=-1) @ values.double()).float()


@pytest.mark.parametrize("tokens", [1, 50, TOKENS_AT_ONCE, TOKENS_AT_ONCE + 1])
def test_parts_over_tokens_are_attention_over_all(tokens: int) -> None:
    query = scaled_query(drawn(1, KV_HEADS * GROUP, HEAD_DIM) * 3, KV_HEADS)
    keys, values = drawn(2, KV_HEADS, tokens, HEAD_DIM), drawn(3, KV_HEADS, tokens, HEAD_DIM)
    parts = attend_tokens(query, keys, values)
    assert len(parts) == math.ceil(tokens / TOKENS_AT_ONCE)
    torch.testing.assert_close(merged([no_part(query), *parts])[1], exact(query, keys, values), atol=1e-5, rtol=1e-4)
    assert attend_tokens(query, keys[:, :0], values[:, :0]) == []


@pytest.mark.parametrize("of_heads", [[0, 0, 1, 1], [0, 1, 1, 1, 1], [1, 0, 1], [0], [1, 1]])
def test_blocks_may_be_of_any_heads(of_heads: list[int]) -> None:
    query = scaled_query(drawn(4, KV_HEADS * GROUP, HEAD_DIM), KV_HEADS)
    blocks = drawn(5, len(of_heads), 2, BLOCK, HEAD_DIM)
    heads = torch.tensor(of_heads)
    ranks = torch.tensor([of_heads[:place].count(head) for place, head in enumerate(of_heads)])
    logit, value = attend_blocks(query, blocks, heads, ranks)
    for head in range(KV_HEADS):
        mine = blocks[heads == head]
        if not len(mine):
            assert torch.isneginf(logit[head]).all()
            assert (value[head] == 0).all()
            continue
        keys, values = (mine[:, plane].reshape(1, -1, HEAD_DIM) for plane in range(2))
        torch.testing.assert_close(value[head][None], exact(query[head][None], keys, values), atol=1e-5, rtol=1e-4)


def test_a_part_without_tokens_counts_nothing_whatever_its_value() -> None:
    query = scaled_query(drawn(6, KV_HEADS * GROUP, HEAD_DIM), KV_HEADS)
    (part,) = attend_tokens(query, drawn(7, KV_HEADS, 5, HEAD_DIM), drawn(8, KV_HEADS, 5, HEAD_DIM))
    logit, value = no_part(query)
    for wrong in (math.nan, math.inf):
        found = merged([(logit, value + wrong), part])
        torch.testing.assert_close(found[1], part[1])
        torch.testing.assert_close(found[0], part[0])


def test_no_parts_with_tokens_are_none() -> None:
    query = scaled_query(drawn(9, KV_HEADS * GROUP, HEAD_DIM), KV_HEADS)
    logit, value = merged([no_part(query), no_part(query)])
    assert torch.isneginf(logit).all()
    assert (value == 0).all()


def test_numbers_that_are_none_stay_in_their_head() -> None:
    query = scaled_query(drawn(10, KV_HEADS * GROUP, HEAD_DIM), KV_HEADS)
    keys, values = drawn(11, KV_HEADS, 9, HEAD_DIM), drawn(12, KV_HEADS, 9, HEAD_DIM)
    keys[1, 4, 0] = math.nan
    found = merged([no_part(query), *attend_tokens(query, keys, values)])[1]
    assert torch.isnan(found[1]).all()
    assert torch.isfinite(found[0]).all()


def test_large_logits_do_not_overflow() -> None:
    query = scaled_query(torch.full((KV_HEADS * GROUP, HEAD_DIM), 1e4), KV_HEADS)
    keys, values = drawn(13, KV_HEADS, 9, HEAD_DIM).abs(), drawn(14, KV_HEADS, 9, HEAD_DIM)
    parts = [*attend_tokens(query, keys, values), *attend_tokens(query, -keys, values)]
    torch.testing.assert_close(merged(parts)[1], exact(query, keys, values), atol=1e-5, rtol=1e-4)
