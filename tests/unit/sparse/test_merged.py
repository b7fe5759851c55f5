"""Merge of partial attention: exact against one softmax, stable, and blind to parts without tokens."""

import numpy as np
import pytest

from kvpool_sparse.results import Floats, merged

HEADS, DIM = 3, 8
Part = tuple[Floats, Floats]


def part_of(logits: Floats, values: Floats) -> Part:
    """Attention over tokens with these logits [heads, tokens] and values [tokens, dim]."""
    most = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - most)
    total = weights.sum(axis=1)
    logit = (most[:, 0] + np.log(total)).astype(np.float32)
    return logit, (weights @ values / total[:, None]).astype(np.float32)


def empty(value: float = 0.0) -> Part:
    return np.full(HEADS, -np.inf, np.float32), np.full((HEADS, DIM), value, np.float32)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_parts_merge_to_attention_over_all_tokens(scale: float) -> None:
    random = np.random.default_rng(3)
    logits = (scale * random.standard_normal((HEADS, 60))).astype(np.float32)
    values = random.standard_normal((60, DIM)).astype(np.float32)
    parts = [part_of(logits[:, a:b], values[a:b]) for a, b in ((0, 10), (10, 11), (11, 60))]
    logit, value = merged(parts)
    expected_logit, expected = part_of(logits, values)
    np.testing.assert_allclose(logit, expected_logit, rtol=1e-5)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_a_part_without_tokens_counts_nothing_even_with_nan_values() -> None:
    random = np.random.default_rng(4)
    one = part_of(
        random.standard_normal((HEADS, 5)).astype(np.float32), random.standard_normal((5, DIM)).astype(np.float32)
    )
    logit, value = merged([one, empty(np.nan)])
    assert np.array_equal(value, one[1])
    np.testing.assert_allclose(logit, one[0], rtol=1e-6)


def test_nothing_at_all_is_zero_mass_and_zero_value() -> None:
    logit, value = merged([empty(), empty(np.nan)])
    assert np.isneginf(logit).all()
    assert not value.any()


def test_a_nan_part_is_not_hidden() -> None:
    random = np.random.default_rng(5)
    one = part_of(
        random.standard_normal((HEADS, 5)).astype(np.float32), random.standard_normal((5, DIM)).astype(np.float32)
    )
    bad = (np.full(HEADS, np.nan, np.float32), np.full((HEADS, DIM), np.nan, np.float32))
    logit, value = merged([one, bad])
    assert np.isnan(logit).all()
    assert np.isnan(value).all()
