"""Exact attention over blocks, and attention over some of them: what every way of recall is compared with.

The tokens are split as a sequence is: `init` at the start and a window at the end are resident, whole blocks lie between. A
part of the attention is a pair (logit, value): the natural log of the sum of exp(q.k / sqrt(D)) over its tokens, and their
weighted mean value. Parts are merged in float32; an empty one has logit -inf. Pure functions of their arguments; any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BLOCK_TOKENS = 128
# What a sequence of 65,536 tokens keeps resident; shorter ones keep the same shares.
INIT_SHARE = 1024 / 65_536
WINDOW_SHARE = 7192 / 65_536
# Queries that are looked at together: bounds memory.
_QUERIES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Split:
    """Resident tokens of a sequence, and the middle blocks between them."""

    init: int
    middle_blocks: int

    @property
    def middle(self) -> slice:
        """Tokens of the middle blocks."""
        return slice(self.init, self.init + self.middle_blocks * BLOCK_TOKENS)


def split_tokens(tokens: int) -> Split:
    """The split of a sequence of so many tokens, in whole blocks."""
    init = max(1, round(tokens * INIT_SHARE / BLOCK_TOKENS)) * BLOCK_TOKENS
    window = max(1, round(tokens * WINDOW_SHARE / BLOCK_TOKENS)) * BLOCK_TOKENS
    return Split(init, max(0, (tokens - init - window) // BLOCK_TOKENS))


def blocks_for(share: float, middle_blocks: int) -> int:
    """Blocks that a budget allows."""
    return min(middle_blocks, int(np.ceil(share * middle_blocks - 1e-9)))


@dataclass(frozen=True, slots=True)
class Samples:
    """Keys and values [kv_heads, n, D] after RoPE, and queries [queries, heads, D] on them.

    `visible` is how many tokens each query sees, `needles` the token that it looks for (-1: none).
    """

    keys: Floats
    values: Floats
    queries: Floats
    visible: Ints
    needles: Ints

    def middle(self, split: Split) -> tuple[Floats, Floats]:
        """Keys and values of the middle blocks, [kv_heads, blocks, tokens, D]."""
        shape = (len(self.keys), split.middle_blocks, BLOCK_TOKENS, self.keys.shape[-1])
        return self.keys[:, split.middle].reshape(shape), self.values[:, split.middle].reshape(shape)


@dataclass(frozen=True, slots=True)
class Recall:
    """Chosen blocks [queries, kv_heads, n], and the tail of all others: logits [queries, heads], values [queries, heads, D]."""

    blocks: Ints
    tail: tuple[Floats, Floats] | None


def log_sum_exp(logits: Floats) -> Floats:
    """Over the last axis; -inf of nothing."""
    if logits.shape[-1] == 0:
        return np.full(logits.shape[:-1], -np.inf, dtype=np.float32)
    top = logits.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, np.float32(0))
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0], dtype=np.float32)


def merged(logits: Floats, values: Floats) -> Floats:
    """The output of parts: logits [..., parts], values [..., parts, D]. Requires one part that is not empty."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total = (weights[..., None, :] @ values)[..., 0, :]
    return np.asarray(total / weights.sum(axis=-1)[..., None], dtype=np.float32)


class Exact:
    """All blocks' parts of the attention of some samples.

    Invariant: merging the resident part with those of all blocks gives `outputs`.
    """

    def __init__(self, samples: Samples, split: Split) -> None:
        self.samples, self.split = samples, split
        queries, heads, dim = samples.queries.shape
        blocks = split.middle_blocks
        self.resident_logits = np.empty((queries, heads), np.float32)
        self.resident_values = np.empty((queries, heads, dim), np.float32)
        self.block_logits = np.empty((queries, heads, blocks), np.float32)
        self.block_values = np.empty((queries, heads, blocks, dim), np.float32)
        self._needle_logits = np.full((queries, heads), -np.inf, np.float32)
        for start in range(0, queries, _QUERIES_AT_ONCE):
            self._look(slice(start, min(start + _QUERIES_AT_ONCE, queries)))
        parts = np.concatenate([self.resident_logits[..., None], self.block_logits], axis=-1)
        values = np.concatenate([self.resident_values[..., None, :], self.block_values], axis=-2)
        self.outputs = merged(parts, values)
        self.total_logits = log_sum_exp(parts)

    def _look(self, rows: slice) -> None:
        """Parts of some queries."""
        samples, middle = self.samples, self.split.middle
        dim = samples.keys.shape[-1]
        group = samples.queries.shape[1] // len(samples.keys)
        hidden = np.arange(samples.keys.shape[1])[None, :] >= samples.visible[rows, None]
        needles = samples.needles[rows]
        for kv_head, (keys, values) in enumerate(zip(samples.keys, samples.values, strict=True)):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            logits = (samples.queries[rows, heads] @ keys.T) * np.float32(dim**-0.5)
            logits[np.broadcast_to(hidden[:, None], logits.shape)] = -np.inf
            found = np.take_along_axis(logits, np.maximum(needles, 0)[:, None, None], axis=2)[..., 0]
            self._needle_logits[rows, heads] = np.where(needles[:, None] >= 0, found, -np.inf)
            in_blocks = logits[..., middle].reshape(*logits.shape[:2], -1, BLOCK_TOKENS)
            self.block_logits[rows, heads] = log_sum_exp(in_blocks)
            weights = np.exp(in_blocks - self.block_logits[rows, heads, :, None])
            blocks = values[middle].reshape(-1, BLOCK_TOKENS, dim)
            mixed = weights.transpose(2, 0, 1, 3).reshape(len(blocks), -1, BLOCK_TOKENS) @ blocks
            shaped = mixed.reshape(len(blocks), *logits.shape[:2], dim).transpose(1, 2, 0, 3)
            self.block_values[rows, heads] = shaped
            logits[..., middle] = -np.inf
            self.resident_logits[rows, heads] = log_sum_exp(logits)
            self.resident_values[rows, heads] = np.exp(logits - self.resident_logits[rows, heads, None]) @ values

    @property
    def needle_mass(self) -> Floats:
        """Share of the attention that the needle has, [queries, heads]; 0 where the query looks for none."""
        return np.asarray(np.exp(self._needle_logits - self.total_logits))

    def block_mass(self) -> Floats:
        """Share of the attention that each block has, summed over the heads of a group: [queries, kv_heads, blocks]."""
        share = np.exp(self.block_logits - self.total_logits[..., None])
        queries, _, blocks = share.shape
        return np.asarray(share.reshape(queries, len(self.samples.keys), -1, blocks).sum(axis=2))

    def tail_weight(self, recall: Recall) -> Floats:
        """Share of the output that the tail has beside the resident tokens and the chosen blocks, [queries, heads]."""
        if recall.tail is None:
            return np.zeros_like(self.resident_logits)
        group = self.samples.queries.shape[1] // len(self.samples.keys)
        chosen = np.take_along_axis(self.block_logits, np.repeat(recall.blocks, group, axis=1), axis=2)
        exact = np.logaddexp(self.resident_logits, log_sum_exp(chosen))
        return np.asarray(np.exp(recall.tail[0] - np.logaddexp(exact, recall.tail[0])))

    def sparse(self, recall: Recall) -> Floats:
        """Output [queries, heads, D] of the resident tokens, the chosen blocks and the tail."""
        group = self.samples.queries.shape[1] // len(self.samples.keys)
        chosen = np.repeat(recall.blocks, group, axis=1)
        logits = [self.resident_logits[..., None], np.take_along_axis(self.block_logits, chosen, axis=2)]
        values = [self.resident_values[..., None, :], np.take_along_axis(self.block_values, chosen[..., None], axis=2)]
        if recall.tail is not None:
            logits.append(recall.tail[0][..., None])
            values.append(recall.tail[1][..., None, :])
        return merged(np.concatenate(logits, axis=-1), np.concatenate(values, axis=-2))
