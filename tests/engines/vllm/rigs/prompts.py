"""Prompts by number: the same token ids in every process."""

import numpy as np

from tests.engines.vllm.rigs.engine import CHUNK_TOKENS
from tests.engines.vllm.rigs.tiny_models import VOCABULARY

# Lengths around the boundaries of blocks and chunks, one below a chunk, one of many chunks.
LENGTHS = (40, 200, 257, 320, 333, 700)


def prompt(number: int, length: int) -> list[int]:
    """Token ids that depend on the number."""
    ids: list[int] = np.random.default_rng(100 + number).integers(3, VOCABULARY, length).tolist()
    return ids


def prompts(first: int) -> list[list[int]]:
    """One prompt of each length."""
    return [prompt(first + index, length) for index, length in enumerate(LENGTHS)]


def loadable_tokens(asked: list[list[int]]) -> int:
    """Tokens of whole chunks that leave at least one token to compute."""
    return sum((len(ids) - 1) // CHUNK_TOKENS * CHUNK_TOKENS for ids in asked)
