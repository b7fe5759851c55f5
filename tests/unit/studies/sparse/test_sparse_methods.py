"""Ways to recall on structured keys: the best choice keeps most, ours loses little, and budgets have both their ends."""

import numpy as np
import pytest

from studies.sparse.exact import Exact, Recall, Samples, blocks_for, split_tokens
from studies.sparse.measures import head_spreads, measure, rule_rows
from studies.sparse.methods import METHODS, OracleMethod, clusters_method, make_method
from studies.sparse.synthetic_keys import SyntheticOptions, synthetic_samples

TOKENS = 8192


def _samples(**options: object) -> Samples:
    return synthetic_samples(SyntheticOptions(seed=3, tokens=TOKENS, queries=6, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact(_samples(), split_tokens(TOKENS))


def test_needles_are_asked_once_and_lie_in_the_middle(exact: Exact) -> None:
    needles, middle = exact.samples.needles, exact.split.middle
    assert len(set(needles.tolist())) == len(needles)
    assert needles.min() >= middle.start
    assert needles.max() < middle.stop
    assert (exact.needle_mass > 0.2).mean() > 0.2


def test_parts_of_all_blocks_are_plain_attention(exact: Exact) -> None:
    samples = exact.samples
    logits = samples.queries[1, 0] @ samples.keys[0].T * samples.keys.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max())
    assert np.allclose(exact.outputs[1, 0], weights @ samples.values[0] / weights.sum(), atol=1e-4)


def test_the_best_choice_keeps_as_much_as_any(exact: Exact) -> None:
    best = measure(exact, OracleMethod(exact))
    for name in METHODS:
        method = make_method(name)
        method.summarise(*exact.samples.middle(exact.split))
        for budget, loss in measure(exact, method).items():
            assert loss.mass <= best[budget].mass + 1e-3, name
            assert loss.mass_best == pytest.approx(best[budget].mass_best)


def test_the_native_way_is_that_of_the_reference(exact: Exact) -> None:
    found = {}
    for name in ("clusters7", "clusters7-native"):
        method = make_method(name)
        method.summarise(*exact.samples.middle(exact.split))
        found[name] = method.recall(exact.samples.queries, blocks_for(0.05, exact.split.middle_blocks))
    native, reference = found["clusters7-native"], found["clusters7"]
    kv_heads = native.blocks.shape[1]
    same = [
        len(set(native.blocks[q, g].tolist()) & set(reference.blocks[q, g].tolist())) / native.blocks.shape[2]
        for q in range(len(native.blocks))
        for g in range(kv_heads)
    ]
    assert np.mean(same) > 0.95
    assert native.tail is not None
    assert reference.tail is not None
    assert np.allclose(native.tail[0], reference.tail[0], atol=0.2)
    losses = [np.linalg.norm(exact.sparse(each) - exact.outputs, axis=-1).mean() for each in (native, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_no_budget_recalls_none_and_a_whole_one_all(exact: Exact, name: str) -> None:
    method = make_method(name)
    method.summarise(*exact.samples.middle(exact.split))
    none = method.recall(exact.samples.queries, 0)
    assert none.blocks.shape == (6, 2, 0)
    assert np.isfinite(exact.sparse(none)).all()
    everything = method.recall(exact.samples.queries, exact.split.middle_blocks)
    assert everything.tail is None or np.isneginf(everything.tail[0]).all()
    assert np.allclose(exact.sparse(everything), exact.outputs, atol=1e-4)


def test_the_tail_of_a_query_of_zeros_counts_tokens_and_means_their_values(exact: Exact) -> None:
    keys, values = exact.samples.middle(exact.split)
    method = clusters_method(is_quantised=False)
    method.summarise(keys, values)
    recall = method.recall(np.zeros_like(exact.samples.queries[:1]), 3)
    assert recall.tail is not None
    left = keys.shape[1] - 3
    assert np.allclose(recall.tail[0], np.log(left * keys.shape[2]), atol=1e-4)
    others = np.delete(values[1], recall.blocks[0, 1], axis=0).reshape(-1, values.shape[-1])
    assert np.allclose(recall.tail[1][0, -1], others.mean(axis=0), atol=1e-3)


def test_the_rule_finds_heads_that_follow_the_phase_of_a_constant() -> None:
    spreads = {}
    for name, constants in (("plain", 0.0), ("constants", 150.0)):
        exact = Exact(_samples(kind="flat", constants=constants), split_tokens(TOKENS))
        clusters = clusters_method()
        clusters.summarise(*exact.samples.middle(exact.split))
        spreads[name] = [head_spreads(exact, clusters, 0.05)]
    rows = {
        row["samples"]: row for row in rule_rows(spreads) if (row["rule"], row["spread"]) == ("spread, tail > 0.1", 4.0)
    }
    assert rows["plain"]["dense_kv_heads"] == 0
    assert rows["constants"]["error_after"] < 0.3 * rows["constants"]["error"]  # type: ignore[operator]
    assert rows["constants"]["caught"] >= 0.8  # type: ignore[operator]


def test_the_best_choice_is_for_its_own_queries(exact: Exact) -> None:
    recall = OracleMethod(exact).recall(exact.samples.queries, 2)
    assert isinstance(recall, Recall)
    with pytest.raises(AssertionError, match="queries that were looked at"):
        OracleMethod(exact).recall(exact.samples.queries[:2], 2)
