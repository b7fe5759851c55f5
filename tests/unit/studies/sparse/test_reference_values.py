"""Golden values of the float reference for one block: native summaries and recall are compared with them as well.

The block is made of small integers, so that no generator and no instruction set has a part in it.
"""

import numpy as np
import pytest

from studies.sparse.clusters import cluster
from studies.sparse.exact import Floats
from studies.sparse.methods import clusters_method

HEAD_DIM = 64


def golden_block() -> tuple[Floats, Floats]:
    """Keys and values [128, 64]: four runs that differ in every fifth channel, and one token far from all others."""
    token, channel = np.arange(128)[:, None], np.arange(HEAD_DIM)[None, :]
    keys = ((token * 37 + channel * 101 + (token * channel) % 29) % 113) / 16 - 3.5
    keys += (token // 32) * np.where(channel % 5 == 0, 2, 0)
    keys[77] *= 4
    values = ((token * 53 + channel * 17 + (token * channel) % 31) % 97) / 24 - 2
    return keys.astype(np.float32), values.astype(np.float32)


def golden_query() -> Floats:
    return (((np.arange(HEAD_DIM) * 29) % 41) / 20 - 1).astype(np.float32)


def test_the_summary_of_the_golden_block() -> None:
    keys, values = golden_block()
    summary = cluster(keys[None, None], values[None, None])
    assert summary.counts[0, 0].tolist() == [31, 1, 28, 13, 9, 31, 15]
    assert summary.variances[0, 0] == pytest.approx([3.439, 0, 3.119, 2.424, 2.324, 2.486, 2.287], abs=2e-3)
    assert summary.key_means[0, 0, :, 0] == pytest.approx([4.953, 8.032, 0.121, 2.336, 2.122, 5.427, 0.947], abs=2e-3)
    assert summary.value_means[0, 0, :, 0] == pytest.approx(
        [-0.092, -1.708, 0.124, -0.178, 0.141, -0.161, -0.069], abs=2e-3
    )
    assert np.sqrt(summary.profile[0, 0, :4]) == pytest.approx([1.1971, 0.4496, 0.8288, 0.8938], abs=1e-3)


def test_a_token_far_from_all_others_is_exact() -> None:
    keys, values = golden_block()
    summary = cluster(keys[None, None], values[None, None], is_quantised=False)
    alone = int(np.flatnonzero(summary.counts[0, 0] == 1)[0])
    assert np.array_equal(summary.key_means[0, 0, alone], keys[77])
    assert np.array_equal(summary.value_means[0, 0, alone], values[77])


def test_the_tail_of_the_golden_block() -> None:
    keys, values = golden_block()
    method = clusters_method()
    method.summarise(keys[None, None], values[None, None])
    query = golden_query()[None, None]
    recall = method.recall(query, 0)
    assert recall.tail is not None
    exact = np.log(np.exp(keys @ golden_query() / HEAD_DIM**0.5).sum())
    assert exact == pytest.approx(4.8494, abs=1e-3)
    assert recall.tail[0] == pytest.approx(np.array([[4.7823]]), abs=1e-3)
    assert recall.tail[1][0, 0, :4] == pytest.approx([0.0061, -0.0007, -0.0362, -0.1519], abs=1e-3)
    assert method.spread(query) == pytest.approx(np.array([[[0.4796]]]), abs=1e-3)
