"""Time to the first token of prompts that are in the pool, by the size of a chunk, on vLLM itself.

    PYTHONPATH=. .venv-engines/bin/python -m tests.engines.vllm.measure_chunk_sizes [PROMPTS]

One engine for each size, on one daemon, of a model of 12 layers in bfloat16 on the CPU. Prompts of 300 to 1500 tokens are each
computed once by each engine, and then loaded and taken from the engine's own prefix cache in turns. `reused` is the share of
what blocks of 16 tokens would reuse with one token left to compute. Figures are medians over the prompts with quartiles; the
last line has the ratio of the sizes' times for the same prompt. The floor is the engine's own cache.
"""

import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import DEEP, write_model
from tests.rigs.daemon import Daemon, wait_until

SIZES = (64, 256)
TURNS = 3
BLOCK = 16


class Sized:
    """An engine with chunks of one size, and what it has measured, in milliseconds."""

    def __init__(self, engine: Engine, size: int) -> None:
        self.engine = engine
        self.size = size
        self.cold: list[float] = []
        self.warm: list[float] = []
        self.own: list[float] = []
        self.reused: list[float] = []
        self.first_token(prompt(4999, 1500))

    def first_token(self, ids: list[int]) -> float:
        """Until its first token."""
        return float(self.engine.ask("generate", prompts=[ids], tokens=1)["seconds"]) * 1e3

    def loaded_tokens(self) -> int:
        """From the pool, so far."""
        return sum(int(pool.get("loaded_chunks", 0)) for pool in self.engine.ask("pools")["pools"]) * self.size

    def turn(self, ids: list[int]) -> tuple[float, float]:
        """Of a prompt that is in the pool: from there, and from the engine's own cache."""
        self.engine.forget()
        before = self.loaded_tokens()
        warm = self.first_token(ids)
        self.reused.append((self.loaded_tokens() - before) / ((len(ids) - 1) // BLOCK * BLOCK))
        return warm, self.first_token(ids)


def _has_stored(daemon: Daemon, tokens: int) -> bool:
    return int(daemon.stats()["usage.saved_tokens"]) >= tokens


def main(count: int) -> None:
    lengths = np.random.default_rng(1).integers(300, 1501, count).tolist()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        daemon = stack.enter_context(Daemon(directory, **{"dram.capacity": "2GiB", "dram.huge_pages": "auto"}))
        model = write_model(DEEP, directory)
        sized = []
        for size in SIZES:
            settings: dict[str, object] = {"kvpool.chunk_tokens": size, "kvpool.wait_s": 2.0}
            engine = Engine(model, DEEP, directory / f"{size}.log", socket=daemon.socket, settings=settings)
            sized.append(Sized(stack.enter_context(engine), size))
        ratios = []
        for number, length in enumerate(lengths):
            ids = prompt(5000 + number, length)
            for one in sized:
                stored = int(daemon.stats()["usage.saved_tokens"])
                one.cold.append(one.first_token(ids))
                wanted = stored + (length - 1) // one.size * one.size
                wait_until(partial(_has_stored, daemon, wanted), "it is stored")
            turns = [[one.turn(ids) for one in sized] for _ in range(TURNS)]
            for place, one in enumerate(sized):
                one.warm.append(statistics.median(turn[place][0] for turn in turns))
                one.own.append(statistics.median(turn[place][1] for turn in turns))
            ratios += [turn[0][0] / turn[1][0] for turn in turns]
        print(f"{count} prompts of {min(lengths)} to {max(lengths)} tokens, {TURNS} turns each")
        for one in sized:
            print(
                f"{one.size:4} reused {statistics.mean(one.reused):6.1%}, from the pool {_cell(one.warm)} ms, "
                f"own cache {_cell(one.own)} ms, computed {_cell(one.cold)} ms"
            )
        print(f"{SIZES[0]} takes {_cell(ratios, 3)} of the time of {SIZES[1]}")


def _cell(taken: list[float], digits: int = 1) -> str:
    low, middle, high = statistics.quantiles(taken, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
