"""Gain and cost of a pool for an engine with many requests at once, on vLLM itself.

    PYTHONPATH=.:client .venv-engines/bin/python -m tests.engines.vllm.measure_bursts [burst] [rates] [reuse] [steps] [beside]

A model of 4 layers in float32 on the CPU. Rounds with and without the pool take turns in one engine, each with new prompts;
figures are medians with the least and the most. For a machine that does nothing else: requests a second and times are by the
clock. `burst`: 512 stored prompts at once. `rates`: 32 and 128 prompts that are not stored. `reuse`: 32 prompts of which 80 %
are. `steps`: processor time of a step that decodes 32 and 256 requests. `beside`: the hits of two engines with four busy loops.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tests.engines.vllm.rigs.driver import FOR_NEW_REQUESTS
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED, write_model
from tests.rigs.daemon import Daemon, wait_until

ROUNDS = 5
BURST, BURST_TOKENS = 512, 330
KINDS = ("none", "pool")


class Bench:
    """The engines' daemon and models, and numbers for prompts that were not asked before."""

    def __init__(self, directory: Path, daemon: Daemon, stack: ExitStack) -> None:
        self.daemon = daemon
        self._directory = directory
        self._stack = stack
        self._next = 20_000
        self._engines = 0
        self._model: Path | None = None

    def start(self, blocks: int = 6144, settings: dict[str, object] | None = None) -> Engine:
        """An engine in one process with room for all of a burst."""
        self._engines += 1
        self._model = self._model or write_model(GROUPED, self._directory)
        engine = Engine(
            self._model,
            GROUPED,
            self._directory / f"{self._engines}.log",
            socket=self.daemon.socket,
            settings=settings,
            takes_every_hit=False,
            max_num_seqs=BURST,
            num_gpu_blocks_override=blocks,
        )
        return self._stack.enter_context(engine)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts that nobody has asked."""
        self._next += count
        return [prompt(self._next + number, tokens) for number in range(count)]

    def wait_stored(self, tokens: int) -> None:
        """Wait until so many tokens are stored, as `stored` counts them."""
        wait_until(lambda: self.stored() >= tokens, f"{tokens} tokens are stored", 120.0)

    def stored(self) -> int:
        """Tokens that were stored so far."""
        return int(self.daemon.stats()["usage.saved_tokens"])

    def store(self, engine: Engine, asked: list[list[int]]) -> None:
        """Have an engine compute prompts, and wait until the pool has them."""
        before = self.stored()
        engine.tokens(asked, 1)
        self.wait_stored(before + sum(len(ids) // CHUNK_TOKENS * CHUNK_TOKENS for ids in asked))


def shown(values: Sequence[float], digits: int = 1) -> str:
    """A median with the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def loaded_tokens(engine: Engine) -> int:
    """From the pool, so far."""
    return int(engine.ask("counters").get("prompt_tokens_cached_by_source/host", 0))


def measure_burst(bench: Bench) -> None:
    """All stored prompts at once: what is taken, when the last promise has come, and the longest step."""
    engine = bench.start(settings={"kvpool.always_load": True})
    asked = bench.prompts(BURST, BURST_TOKENS)
    bench.store(engine, asked)
    engine.ask("watch_connector")
    last, longest, taken, answers, parts = [], [], [], [], []
    for _ in range(ROUNDS):
        before = loaded_tokens(engine)
        engine.tokens(asked, 1)
        spent = engine.ask("connector_seconds")
        taken.append((loaded_tokens(engine) - before) / loadable_tokens(asked) * 100)
        last.append(max(spent["promised"]) * 1e3)
        answers.append(statistics.median(spent["promised"]) * 1e3)
        steps = [[step.get(name, 0.0) * 1e3 for name in FOR_NEW_REQUESTS] for step in spent["steps"]]
        longest.append(max(map(sum, steps)))
        parts.append(max(steps, key=sum))
    print(f"burst of {BURST} stored prompts of {BURST_TOKENS} tokens: {shown(taken)} % of the hit tokens taken")
    print(f"  half of the promises after {shown(answers)} ms, the last one after {shown(last)} ms")
    print(f"  longest step {shown(longest, 2)} ms of processor time for new requests")
    for place, name in enumerate(FOR_NEW_REQUESTS):
        print(f"    of it {shown([part[place] for part in parts], 2)} ms in {name}")


def measure_rates(bench: Bench) -> None:
    """Prompts that are not stored, with and without the pool."""
    engine = bench.start()
    for count in (32, 128):
        gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(ROUNDS + 1):
            for kind in KINDS if number % 2 else reversed(KINDS):
                asked = bench.prompts(count, 512)
                engine.forget()
                engine.ask("plug", is_plugged=kind == "pool")
                found = engine.ask("token_gaps", prompts=asked, tokens=48)
                engine.ask("plug", is_plugged=True)
                if number:  # the first round warms the engine up
                    gaps[kind].append(float(np.percentile(found["gaps"], 99)) * 1e3)
                    rates[kind].append(count / found["seconds"])
        _compare(f"{count} prompts of 512 tokens at once, none stored, requests a second", rates)
        _compare(f"{count} prompts of 512 tokens at once, none stored, p99 between tokens, ms", gaps)


def measure_reuse(bench: Bench) -> None:
    """Prompts of which four fifths are stored, with and without the pool."""
    engine = bench.start()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind in KINDS:
            stems = bench.prompts(32, 1024)
            bench.store(engine, stems)
            asked = [stem + more for stem, more in zip(stems, bench.prompts(32, 256), strict=True)]
            engine.forget()
            engine.ask("plug", is_plugged=kind == "pool")
            rates[kind].append(32 / engine.ask("generate", prompts=asked, tokens=4)["seconds"])
            engine.ask("plug", is_plugged=True)
    _compare("32 prompts of 1280 tokens at once, 1024 of each stored, requests a second", rates)


def measure_steps(bench: Bench) -> None:
    """Processor time of a step's thread with a pool, with a connector that does nothing, and with none."""
    engine = bench.start()
    for count in (32, 256):
        costs = engine.ask("steps_in_turns", prompts=bench.prompts(count, 128), rounds=100)
        cpu = {kind: np.array(steps)[:, 1] * 1e3 for kind, steps in costs.items()}
        for kind in ("empty", "pool"):
            more = cpu[kind] - cpu["none"]
            quartiles = np.percentile(more, [25, 75]).round(3).tolist()
            text = f"{np.median(more):.3f} ms more than {np.median(cpu['none']):.1f} ms (quartiles {quartiles})"
            print(f"a step that decodes {count} requests, connector {kind}: {text}")


def measure_beside(bench: Bench) -> None:
    """Two engines with half of the stored prompts each, and four busy loops."""
    engines = [bench.start(blocks=4096) for _ in range(2)]
    halves = [bench.prompts(100, BURST_TOKENS) for _ in engines]
    for engine, asked in zip(engines, halves, strict=True):
        bench.store(engine, asked)
        engine.forget()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for number in range(ROUNDS):
            before = [loaded_tokens(engine) for engine in engines]
            for engine in engines:
                engine.forget()
            for engine, asked in zip(engines, halves, strict=True):
                engine.send("generate", prompts=asked, tokens=8)
            for engine in engines:
                engine.answer()
            taken = sum(loaded_tokens(engine) - had for engine, had in zip(engines, before, strict=True))
            there = sum(map(loadable_tokens, halves))
            counts = [_declined(engine) for engine in engines]
            print(
                f"two engines and four busy loops, round {number}: {taken / there:.2%} of the hit tokens taken {counts}"
            )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _declined(engine: Engine) -> dict[str, int]:
    """Why hits were not taken, so far."""
    shown_counts = engine.ask("counters").items()
    return {
        name.removeprefix("kvpool_"): int(count) for name, count in shown_counts if "declined_tokens" in name and count
    }


def _compare(what: str, found: dict[str, list[float]]) -> None:
    have, floor = (statistics.median(found[kind]) for kind in ("pool", "none"))
    print(f"{what}: {shown(found['pool'])}, without {shown(found['none'])}, ratio {have / floor:.3f}", flush=True)


MEASURES: dict[str, Callable[[Bench], None]] = {
    "burst": measure_burst,
    "rates": measure_rates,
    "reuse": measure_reuse,
    "steps": measure_steps,
    "beside": measure_beside,
}


def main(names: Sequence[str]) -> None:
    for name in names or MEASURES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            directory = Path(folder)
            daemon = stack.enter_context(Daemon(directory, **{"dram.capacity": "3GiB", "dram.huge_pages": "auto"}))
            MEASURES[name](Bench(directory, daemon, stack))


if __name__ == "__main__":
    main(sys.argv[1:])
