"""Merge of partial attention: exact against one softmax, stable, and blind to parts without tokens."""

import numpy as np

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


def test_a_part_without_tokens_counts_nothing_even_with_nan_values() -> None:
    random = np.random.default_rng(4)
    one = part_of(
        random.standard_normal((HEADS, 5)).astype(np.float32), random.standard_normal((5, DIM)).astype(np.float32)
    )
    logit, value = merged([one, empty(np.nan)])
    assert np.array_equal(value, one[1])
    np.testing.assert_allclose(logit, one[0], rtol=1e-6)


def test_a_nan_part_is_not_hidden() -> None:
    random = np.random.default_rng(5)
    one = part_of(
        random.standard_normal((HEADS, 5)).astype(np.float32), random.standard_normal((5, DIM)).astype(np.float32)
    )
    bad = (np.full(HEADS, np.nan, np.float32), np.full((HEADS, DIM), np.nan, np.float32))
    logit, value = merged([one, bad])
    assert np.isnan(logit).all()
    assert np.isnan(value).all()
