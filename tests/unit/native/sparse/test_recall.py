"""Native summaries and recall from numpy arrays, against numpy models of the formulas."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_native

DIM, KV_HEADS, GROUP, TOKENS = 64, 2, 3, 32
HEADS = KV_HEADS * GROUP
Floats = npt.NDArray[np.float32]


@pytest.fixture
def team() -> kvpool_native.WorkerTeam:
    return kvpool_native.WorkerTeam(2)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        kvpool_native.force_sparse_path(request.param)
    except ValueError:
        pytest.skip("this machine has no such path")
    yield kvpool_native.sparse_path()
    kvpool_native.force_sparse_path("")


def _some_kv(blocks: int, seed: int) -> tuple[Floats, Floats]:
    """Keys and values [block, token, kv_head, channel]."""
    random = np.random.default_rng(seed)
    shape = (blocks, TOKENS, KV_HEADS, DIM)
    topics = random.normal(size=(blocks, 1, KV_HEADS, DIM))
    return ((topics + 0.5 * random.normal(size=shape)).astype(np.float32), random.normal(size=shape).astype(np.float32))


def _addresses(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    return np.uint64(array.ctypes.data) + np.arange(len(array), dtype=np.uint64) * np.uint64(array[0].nbytes)


def _summaries(keys: Floats, values: Floats) -> npt.NDArray[np.uint8]:
    size = kvpool_native.summary_bytes("clusters7", DIM)
    out = np.full((len(keys), KV_HEADS, size), 0xAA, np.uint8)
    kvpool_native.build_summaries(
        form="clusters7",
        dtype="float32",
        head_dim=DIM,
        kv_heads=KV_HEADS,
        keys=_addresses(keys),
        values=_addresses(values),
        token_stride=keys[0, 0].nbytes,
        block_tokens=TOKENS,
        out=out.reshape(-1),
    )
    return out


def _recall(form: str = "clusters7", **rule: float) -> kvpool_native.Recall:
    return kvpool_native.Recall(form="clusters7", head_dim=DIM, kv_heads=KV_HEADS, group=GROUP, **rule)


def test_sizes_are_those_of_the_format() -> None:
    assert [kvpool_native.summary_bytes("clusters7", dim) for dim in (64, 128)] == [849, 1677]
    assert kvpool_native.summary_bytes("mean", 128) == 256
    for form, dim in (("clusters", 64), ("mean", 0), ("mean", 48), ("clusters7", 288)):
        with pytest.raises(ValueError, match="must be"):
            kvpool_native.summary_bytes(form, dim)


def test_the_tail_is_close_to_the_attention_it_stands_for(path: str, team: kvpool_native.WorkerTeam) -> None:
    keys, values = _some_kv(40, 2)
    records = _summaries(keys, values)
    queries = np.random.default_rng(3).normal(size=(HEADS, DIM)).astype(np.float32)
    *_, logits, means = _recall().run(team, queries, _addresses(records), take=0, wants_tail=True)
    assert logits is not None
    assert means is not None
    for head in range(HEADS):
        scores = (keys[:, :, head // GROUP] @ queries[head] / math.sqrt(DIM)).reshape(-1)
        weights = np.exp(scores - scores.max())
        exact = weights @ values[:, :, head // GROUP].reshape(-1, DIM) / weights.sum()
        assert abs(logits[head] - (math.log(weights.sum()) + scores.max())) < 0.1
        assert np.linalg.norm(means[head] - exact) < 0.5 * np.linalg.norm(exact)


def test_nothing_and_everything_can_be_taken(team: kvpool_native.WorkerTeam) -> None:
    keys, values = _some_kv(9, 6)
    records = _summaries(keys, values)
    queries = np.ones((HEADS, DIM), np.float32)
    chosen, _, kept, _, logits, means = _recall().run(team, queries, _addresses(records), take=9, wants_tail=True)
    assert chosen.tolist() == [list(range(9))] * KV_HEADS
    assert kept.tolist() == [1.0] * HEADS
    assert logits is not None
    assert np.isneginf(logits).all()
    assert means is not None
    assert not means.any()
    chosen, _, kept, _, logits, _ = _recall().run(team, queries, _addresses(records), take=0, wants_tail=True)
    assert chosen.shape == (KV_HEADS, 0)
    assert kept.tolist() == [0.0] * HEADS
    chosen, _, _, _, logits, _ = _recall().run(team, queries, _addresses(records)[:0], take=0, wants_tail=True)
    assert logits is not None
    assert np.isneginf(logits).all()


def test_shapes_that_do_not_fit_are_refused(team: kvpool_native.WorkerTeam) -> None:
    keys, values = _some_kv(4, 11)
    records = _summaries(keys, values)
    queries = np.ones((HEADS, DIM), np.float32)
    for wrong, take in ((queries[1:], 1), (queries[:, 1:].copy(), 1), (queries, 5)):
        with pytest.raises(ValueError, match="must be"):
            _recall().run(team, wrong, _addresses(records), take=take, wants_tail=False)
    for group, kv_heads, bound in ((0, 1, 8.0), (17, 1, 8.0), (1, 0, 8.0), (1, 1, math.nan)):
        with pytest.raises(ValueError, match="must"):
            kvpool_native.Recall(form="mean", head_dim=DIM, kv_heads=kv_heads, group=group, loose_bound=bound)
    for threads in (0, 65):
        with pytest.raises(ValueError, match="threads"):
            kvpool_native.WorkerTeam(threads)
