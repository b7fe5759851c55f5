"""Ways to choose blocks, and to estimate those not chosen: the published ones, the one that this pool has, and the best choice.

The seam is `Method`: summaries of blocks, then recall on them. Every method chooses by the same rule, the sum over the heads of
a group of each head's share, so that only the summaries differ. A way in another language is one more object with the same two
methods. Single thread of an object.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvpool_native
from studies.sparse.clusters import Clusters, cluster, summarised
from studies.sparse.exact import BLOCK_TOKENS, Exact, Floats, Recall, log_sum_exp

Addresses = npt.NDArray[np.uint64]

RUNS = 4
CORRECTION_MAX = np.float32(30)


class Method(Protocol):
    """A way to recall."""

    def summarise(self, keys: Floats, values: Floats) -> None:
        """Summaries of blocks of keys and values, [kv_heads, blocks, tokens, D]."""

    def recall(self, queries: Floats, count: int) -> Recall:
        """`count` blocks for each KV head, and the tail of the others, for queries [queries, heads, D]."""


def choose(logits: Floats, kv_heads: int, count: int) -> Recall:
    """The blocks with most mass by logits [queries, heads, blocks]; no tail."""
    share = np.exp(logits - log_sum_exp(logits)[..., None])
    queries, _, blocks = share.shape
    scores = share.reshape(queries, kv_heads, -1, blocks).sum(axis=2)
    return Recall(np.argsort(-scores, axis=-1, kind="stable")[..., :count], None)


def grouped(queries: Floats, kv_heads: int) -> Floats:
    """Queries by KV head: [kv_heads, queries * group, D]."""
    count, heads, dim = queries.shape
    by_head = queries.reshape(count, kv_heads, heads // kv_heads, dim).transpose(1, 0, 2, 3)
    return by_head.reshape(kv_heads, -1, dim)


def ungrouped(x: Floats, queries: int) -> Floats:
    """The other way: [kv_heads, queries * group, ...] by query and head."""
    by_head = x.reshape(len(x), queries, -1, *x.shape[2:])
    return np.moveaxis(by_head, 0, 1).reshape(queries, -1, *x.shape[2:])


class BoundMethod:
    """One number per block and head from a few vectors of the block: mean, bounds, or centre and deviation. No tail."""

    def __init__(self, describe: Callable[[Floats], Floats], score: Callable[[Floats, Floats], Floats]) -> None:
        self._describe, self._score = describe, score
        self._described = np.zeros((1, 0, 1, 1), np.float32)

    def summarise(self, keys: Floats, values: Floats) -> None:  # noqa: ARG002 - of the interface
        """Vectors of each block."""
        self._described = self._describe(keys)

    def recall(self, queries: Floats, count: int) -> Recall:
        """Blocks by score."""
        kv_heads = len(self._described)
        scores = self._score(grouped(queries, kv_heads), self._described) * np.float32(queries.shape[-1] ** -0.5)
        return choose(ungrouped(scores, len(queries)), kv_heads, count)


def _dot(x: Floats, vectors: Floats) -> Floats:
    return np.asarray(x @ vectors.swapaxes(-1, -2))


def mean_method() -> Method:
    """The mean key of a block."""
    return BoundMethod(lambda keys: keys.mean(axis=-2)[..., None, :], lambda q, d: _dot(q, d[:, :, 0]))


def quest_method() -> Method:
    """Quest: the largest product that a key within the block's bounds can have."""
    return BoundMethod(
        lambda keys: np.stack([keys.min(axis=-2), keys.max(axis=-2)], axis=-2),
        lambda q, d: _dot(np.minimum(q, 0), d[:, :, 0]) + _dot(np.maximum(q, 0), d[:, :, 1]),
    )


def arkvale_method() -> Method:
    """In the manner of ArkVale: the product with the centre, and the deviation of each channel in the query's favour."""
    return BoundMethod(
        lambda keys: np.stack([keys.mean(axis=-2), keys.std(axis=-2)], axis=-2),
        lambda q, d: _dot(q, d[:, :, 0]) + _dot(np.abs(q), d[:, :, 1]),
    )


class ClusterMethod:
    """Several means per block with counts and variances, and a tail from the same means.

    `choice_correction` and `tail_correction` are the shares of the Gaussian correction, the variance of the logits of a
    cluster, that are added to its logit.
    """

    def __init__(
        self,
        summarise: Callable[[Floats, Floats], Clusters],
        choice_correction: float = 0.5,
        tail_correction: float = 0.25,
    ) -> None:
        self._summarise = summarise
        self._choice_correction, self._tail_correction = choice_correction, tail_correction
        self._clusters: Clusters | None = None

    def summarise(self, keys: Floats, values: Floats) -> None:
        """Clusters of all blocks."""
        self._clusters = self._summarise(keys, values)

    def recall(self, queries: Floats, count: int) -> Recall:
        """Blocks by the logarithm of their estimated sum, and the tail of the others."""
        clusters = self._known()
        logits, variance = self._estimates(queries)
        by_block = self._by_block(logits, variance)
        choice = choose(ungrouped(by_block, len(queries)), len(logits), count)
        if count >= by_block.shape[-1]:
            heads = (len(queries), queries.shape[1])
            return Recall(choice.blocks, (np.full(heads, -np.inf, np.float32), np.zeros_like(queries)))
        terms = logits + np.minimum(self._tail_correction * variance, CORRECTION_MAX)
        is_chosen = np.zeros((len(queries), len(logits), by_block.shape[-1]), bool)
        np.put_along_axis(is_chosen, choice.blocks, True, axis=-1)
        group = queries.shape[1] // len(logits)
        hidden = np.repeat(is_chosen.transpose(1, 0, 2), group, axis=1)
        terms[hidden] = -np.inf
        terms = terms.reshape(*terms.shape[:2], -1)
        tail = log_sum_exp(terms)
        values = np.exp(terms - tail[..., None]) @ clusters.value_means.reshape(len(logits), -1, queries.shape[-1])
        return Recall(choice.blocks, (ungrouped(tail, len(queries)), ungrouped(values, len(queries))))

    def kept(self, queries: Floats, recall: Recall) -> Floats:
        """Share of the blocks' mass that the chosen ones have, by the estimates alone: [queries, heads]."""
        by_block = ungrouped(self._by_block(*self._estimates(queries)), len(queries))
        group = queries.shape[1] // recall.blocks.shape[1]
        chosen = np.take_along_axis(by_block, np.repeat(recall.blocks, group, axis=1), axis=2)
        return np.asarray(np.exp(log_sum_exp(chosen) - log_sum_exp(by_block)))

    def _by_block(self, logits: Floats, variance: Floats) -> Floats:
        return log_sum_exp(logits + np.minimum(self._choice_correction * variance, CORRECTION_MAX))

    def spread(self, queries: Floats) -> Floats:
        """Half the variance of the logits within clusters, mean over a block's tokens: [queries, heads, blocks]."""
        counts = self._known().counts[:, None]
        _, variance = self._estimates(queries)
        return ungrouped((variance * counts).sum(axis=-1) / (2 * counts.sum(axis=-1)), len(queries))

    def _estimates(self, queries: Floats) -> tuple[Floats, Floats]:
        """Logits and variances of them, [kv_heads, queries * group, blocks, clusters]."""
        clusters = self._known()
        kv_heads, blocks, count, dim = clusters.key_means.shape
        q = grouped(queries, kv_heads)
        logits = _dot(q, clusters.key_means.reshape(kv_heads, -1, dim)).reshape(kv_heads, -1, blocks, count)
        with np.errstate(divide="ignore"):
            logits = logits * np.float32(dim**-0.5) + np.log(clusters.counts)[:, None]
        weight = _dot(q * q, clusters.profile) / np.float32(dim)
        return logits, weight[..., None] * clusters.variances[:, None]

    def _known(self) -> Clusters:
        assert self._clusters is not None, "summarise comes first"
        return self._clusters


def run_means(keys: Floats, values: Floats, runs: int) -> Clusters:
    """Summaries of runs of a block's tokens, each as long as the others."""
    assigned = np.broadcast_to(np.arange(keys.shape[-2]) * runs // keys.shape[-2], keys.shape[:-1])
    return summarised(keys, values, assigned, runs, is_quantised=False)


def runs_method(runs: int) -> Method:
    """Means of contiguous runs and their tail, without variances."""
    return ClusterMethod(lambda keys, values: run_means(keys, values, runs), 0.0, 0.0)


def clusters_method(
    *, is_scaled: bool = True, tail_correction: float = 0.25, is_quantised: bool = True
) -> ClusterMethod:
    """Seven clusters with variances, and their tail."""
    return ClusterMethod(
        lambda keys, values: cluster(keys, values, is_scaled=is_scaled, is_quantised=is_quantised),
        tail_correction=tail_correction,
    )


class NativeMethod:
    """What sequences use: the native summaries and recall, one query at a time."""

    def __init__(self) -> None:
        self._team = kvpool_native.WorkerTeam(1)
        self._records = np.empty((0, 0, 0), np.uint8)

    def summarise(self, keys: Floats, values: Floats) -> None:
        """Records of all blocks, [blocks, kv_heads, bytes]."""
        kv_heads, blocks, tokens, dim = keys.shape
        by_block = [np.ascontiguousarray(each.transpose(1, 2, 0, 3), np.float32) for each in (keys, values)]
        self._records = np.empty((blocks, kv_heads, kvpool_native.summary_bytes("clusters7", dim)), np.uint8)
        kvpool_native.build_summaries(
            form="clusters7",
            dtype="float32",
            head_dim=dim,
            kv_heads=kv_heads,
            keys=_rows_of(by_block[0]),
            values=_rows_of(by_block[1]),
            token_stride=by_block[0].strides[1],
            block_tokens=tokens,
            out=self._records.reshape(-1),
        )

    def recall(self, queries: Floats, count: int) -> Recall:
        """Blocks and tail, as a sequence gets them."""
        kv_heads, dim = self._records.shape[1], queries.shape[-1]
        native = kvpool_native.Recall(
            form="clusters7", head_dim=dim, kv_heads=kv_heads, group=queries.shape[1] // kv_heads
        )
        records = _rows_of(self._records)
        found = [
            native.run(self._team, np.ascontiguousarray(query, np.float32), records, take=count, wants_tail=True)
            for query in queries
        ]
        blocks = np.stack([each[0] for each in found]).astype(np.int64)
        logits, values = (np.stack([np.asarray(each[at], np.float32) for each in found]) for at in (4, 5))
        return Recall(blocks, (logits, values))


def _rows_of(array: npt.NDArray[np.generic]) -> Addresses:
    """Where each row of the first axis begins."""
    return np.uint64(array.ctypes.data) + np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0])


class OracleMethod:
    """The blocks with most mass, from exact attention. No tail."""

    def __init__(self, exact: Exact) -> None:
        self._exact = exact

    def summarise(self, keys: Floats, values: Floats) -> None:
        """Nothing: the exact attention is known."""

    def recall(self, queries: Floats, count: int) -> Recall:
        """Blocks by exact mass. Requires the queries of the exact attention."""
        assert len(queries) == len(self._exact.samples.queries), "the queries that were looked at"
        order = np.argsort(-self._exact.block_mass(), axis=-1, kind="stable")
        return Recall(order[..., :count], None)


# By name, with the share of the bytes of 16-bit keys and values that a block's summary has (head_dim 128).
METHODS: dict[str, tuple[Callable[[], Method], float]] = {
    "mean": (mean_method, 1 / (2 * BLOCK_TOKENS)),
    "mean+tail": (lambda: runs_method(1), 2 / (2 * BLOCK_TOKENS)),
    "quest": (quest_method, 2 / (2 * BLOCK_TOKENS)),
    "arkvale": (arkvale_method, 2 / (2 * BLOCK_TOKENS)),
    "runs4": (lambda: runs_method(RUNS), 2 * RUNS / (2 * BLOCK_TOKENS)),
    "clusters7-plain": (lambda: clusters_method(is_scaled=False), 1677 / 65_536),
    "clusters7-whole": (lambda: clusters_method(tail_correction=0.5), 1677 / 65_536),
    "clusters7": (clusters_method, 1677 / 65_536),
    "clusters7-native": (NativeMethod, 1677 / 65_536),
}
ORACLE = "oracle"


def make_method(name: str) -> Method:
    """A way of METHODS, by name."""
    return METHODS[name][0]()
