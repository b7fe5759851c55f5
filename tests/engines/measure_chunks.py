"""Cost and benefit of a chunk's size: `python -m tests.engines.measure_chunks [TURNS]`.

KV of a Llama-3 8B (32 layers, 8 heads of 128, bfloat16: 128 KiB a token) in blocks of 16 tokens, prompts of 300 to 1500
tokens, each saved once and loaded once more, for every size of chunk: medians over the prompts in milliseconds with quartiles,
loads and saves for 1000 tokens that they moved. `reused` is the share of what blocks of 16 tokens would reuse with one token
left to compute. Sizes take turns, so that other load on the machine affects all equally; the saved chunks are dropped after
each turn. The floor is a plain copy of as many bytes.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from tests.rigs.daemon import Daemon, wait_until

SIZES = (16, 32, 64, 128, 256)
BLOCK = 16
STEPS = ("keys", "lookup", "acquire", "load", "release", "save")
BLOCKS = 1536 // BLOCK


class Sized:
    """A Pool with chunks of one size, and what it has measured."""

    def __init__(self, daemon: Daemon, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        layout = kv.Layout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", chunk_tokens=chunk_tokens)
        self.pool = daemon.connect(layout, model=f"llama-{chunk_tokens}", timeout_s=30.0, copy_threads=2)
        self.layers = [np.zeros((2, BLOCKS, BLOCK, 8, 128), np.uint16) for _ in range(32)]
        self.cache = self.pool.register(self.layers, BLOCK, "kv_first")
        self.times: dict[str, list[float]] = {step: [] for step in STEPS}
        self.reused: list[float] = []

    def turn(self, prompt: npt.NDArray[np.int32]) -> None:
        """Save a prompt, and load what a request for the same prompt would reuse."""
        whole = len(prompt) // self.chunk_tokens
        ids = list(range(whole * self.chunk_tokens // BLOCK))
        keys = self.pool.keys(prompt)
        self._timed("save", lambda: self.pool.save(keys, self.cache, ids).commit(), whole * self.chunk_tokens)
        asked = self._timed("keys", lambda: self.pool.keys(prompt[:-1]))
        hit = self._timed("lookup", lambda: self.pool.lookup(asked))
        lease = self._timed("acquire", lambda: self.pool.acquire(hit))
        loaded = ids[: lease.tokens // BLOCK]
        result = self._timed("load", lambda: self.pool.load(lease, self.cache, loaded).wait(), lease.tokens)
        self._timed("release", lease.release)
        assert result.tokens == len(asked) * self.chunk_tokens
        self.reused.append(result.tokens / ((len(prompt) - 1) // BLOCK * BLOCK))

    def _timed(self, step: str, work: Callable[[], Any], tokens: int = 1000) -> Any:
        started = time.perf_counter()
        answer = work()
        self.times[step].append((time.perf_counter() - started) * 1e6 / tokens)
        return answer


def main(turns: int) -> None:
    lengths = np.random.default_rng(1).integers(300, 1501, turns)
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory), **{"dram.capacity": "4GiB"}) as daemon:
        floor: list[float] = []
        sized = [Sized(daemon, chunk_tokens) for chunk_tokens in SIZES]
        wait_until(lambda: all(one.pool.connected for one in sized), "the pools are connected")
        for turn, length in enumerate(lengths.tolist()):
            prompt = np.random.default_rng(turn).integers(0, 100_000, length).astype(np.int32)
            for one in sized:
                one.turn(prompt)
            with daemon.admin() as operator:
                operator.flush(None, None)
            floor.append(_copied_ms())
        print(f"{turns} prompts of {lengths.min()} to {lengths.max()} tokens")
        print(f"{'chunk':>6} {'reused':>7} " + " ".join(f"{step:>20}" for step in STEPS))
        for one in sized:
            cells = [_cell(one.times[step][2:]) for step in STEPS]
            print(
                f"{one.chunk_tokens:6} {statistics.mean(one.reused):7.1%} " + " ".join(f"{cell:>20}" for cell in cells)
            )
            one.pool.close()
        print(f"a plain copy of the bytes of 1000 tokens: {_cell(floor)}")


def _copied_ms() -> float:
    source = np.ones(1000 * 128 << 10, np.uint8)
    target = np.zeros_like(source)
    started = time.perf_counter()
    target[:] = source
    return (time.perf_counter() - started) * 1e3


def _cell(taken: list[float]) -> str:
    low, _, high = statistics.quantiles(taken, n=4)
    return f"{statistics.median(taken):.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
