"""The KV that tokens must have in a scripted engine: bytes that derive from a layer, a head and every token up to their own.

Computed and compared for all tokens of a request at once: the scripted engines look at every byte that they attend to.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.specs import WIDTH

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
# A token's KV in one head is one word.
assert np.dtype(np.uint64).itemsize == WIDTH
# Of SplitMix64.
STEP, SHIFTS, FACTORS = 0x9E3779B97F4A7C15, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def kv_of(layer: int, heads: Sequence[int], tokens: Sequence[int], adapter: str = "", *, first: int = 0) -> Bytes:
    """The right KV of each token from the first one on: [tokens, heads, WIDTH]."""
    words = _ends_of(tuple(tokens))[first:, None] ^ _words_of(layer, tuple(heads), adapter)
    return _mixed(words).view(np.uint8).reshape(len(words), len(heads), WIDTH)


def read(kv: Bytes, table: Sequence[int], first: int, end: int) -> Bytes:
    """The KV of a span of tokens in a layer's blocks: [tokens, heads, WIDTH]."""
    blocks = kv[np.asarray(table[first // BLOCK : -(-end // BLOCK)], np.intp)]
    rows = blocks.swapaxes(1, 2).reshape(len(blocks) * BLOCK, *kv.shape[1:2], WIDTH)
    return rows[first % BLOCK :][: end - first]


def write(kv: Bytes, table: Sequence[int], first: int, values: Bytes) -> None:
    """Put the KV of tokens from the first one on into a layer's blocks."""
    places = np.arange(first, first + len(values))
    kv[np.asarray(table, np.intp)[places // BLOCK], :, places % BLOCK] = values


@lru_cache(maxsize=256)
def _ends_of(tokens: tuple[int, ...]) -> Words:
    """A word for each token that every token up to it changes."""
    places = _mixed(np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(STEP))
    return np.add.accumulate(_mixed(np.asarray(tokens, np.uint64) ^ places))


@lru_cache(maxsize=1024)
def _words_of(layer: int, heads: tuple[int, ...], adapter: str) -> Words:
    digests = [hashlib.blake2b(repr((layer, head, adapter)).encode(), digest_size=WIDTH).digest() for head in heads]
    return np.frombuffer(b"".join(digests), np.uint64)


def _mixed(values: Any) -> Words:
    words: Words = values.copy()
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        words ^= words >> np.uint64(shift)
        if factor is not None:
            words *= np.uint64(factor)
    return words
