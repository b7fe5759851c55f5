"""The cost of a call does not grow with the pool."""

import statistics
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import BlockPool

pytestmark = [pytest.mark.torch, pytest.mark.timed]

PROMPT, SIZE = 256, 16


def _prompts() -> Iterator[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Different prompts that all begin with the same token."""
    random = np.random.default_rng(1)
    while True:
        prompt = random.integers(0, 50_000, PROMPT, dtype=np.int32)
        prompt[0] = 1
        yield prompt


def _median_us(num_blocks: int) -> dict[str, float]:
    """CPU time of each call on a full pool: every allocation evicts."""
    blocks = BlockPool(
        layers=1, num_blocks=num_blocks, tokens_per_block=SIZE, kv_heads=1, head_dim=1, dtype="uint8", device="cpu"
    )
    prompts = _prompts()
    spent: dict[str, list[int]] = {}
    full = num_blocks * SIZE // PROMPT + 2
    for number in range(full + 400):
        prompt = next(prompts)
        marks = [time.process_time_ns()]
        assert blocks.allocate(number, prompt) is not None
        marks.append(time.process_time_ns())
        assert blocks.append(number, [3])
        marks.append(time.process_time_ns())
        assert blocks.computed(number, 0, PROMPT + 1)
        marks.append(time.process_time_ns())
        blocks.free(number)
        marks.append(time.process_time_ns())
        if number >= full:
            for name, began, ended in zip(("allocate", "append", "computed", "free"), marks, marks[1:], strict=False):
                spent.setdefault(name, []).append(ended - began)
    assert blocks.stats()["evicted_blocks"] > 400 * PROMPT // SIZE
    return {name: statistics.median(times) / 1e3 for name, times in spent.items()}


def test_calls_cost_the_same_on_a_pool_of_sixty_times_the_blocks() -> None:
    small, large = _median_us(1_000), _median_us(60_000)
    print(f"medians of CPU time in µs: {small} and {large}")
    for name, microseconds in large.items():
        assert microseconds < 2 * small[name] + 5, name
