"""The pool as a secondary tier beside vLLM's own tier of files, on vLLM itself, on one disk.

    PYTHONPATH=.:client:tools .venv-engines/bin/python -m tests.engines.vllm.measure_tier [ROUNDS] [BLOCKS_PER_CHUNK]

A model on the CPU with as much KV for each token as models of several billion weights have, which computes little; the longest
prompts that fit; blocks of 32 tokens. One engine with both tiers
stores the prompts and ends; then two new ones, each with one of the tiers, load them in turns, each prompt once: from the
daemon's DRAM, and after a restart of the daemon from its disk alone. Prompts that nobody has asked are computed in turns with
the tier and with vLLM's region alone, in one engine; steps that decode show what the tier costs where it has nothing to do.
Medians with quartiles. For a machine that does nothing else: times are by the clock. Beside them stand those without the waits
of the engine's thread for a processor, or processor time, for one that is busy.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.engines.vllm.conftest import wait_restored, wait_served
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, Engine, tiering
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import CONTEXT, Geometry, write_model
from tests.rigs.daemon import Daemon, wait_until

# The last chunk that fits, and one token that is computed in any case.
PROMPT_TOKENS = CONTEXT - 256 + 1
# 64 KiB of KV for each token.
MODEL = Geometry("much-kv", "LlamaForCausalLM", 16, 256, 8, 8, 64, 512, 0.1, "float32", 15)
PROMPT_BYTES = PROMPT_TOKENS * MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim * 4
STEPS = 400
TIMEOUT_S = 60.0
RESTART_MEANT, STEP_US_MEANT, MISS_MEANT = 0.8, 20.0, 1.02


class Bench:
    """A daemon, a model, engines of it, and prompts that were not asked before."""

    def __init__(self, directory: Path, stack: ExitStack, blocks_per_chunk: int, rounds: int) -> None:
        self._directory, self._stack, self._blocks_per_chunk = directory, stack, blocks_per_chunk
        self._model = write_model(MODEL, directory)
        room = f"{(2 * rounds + 3) * PROMPT_BYTES >> 20}MiB"
        options = {"dram.capacity": room, "dram.huge_pages": "auto", "ssd.capacity": room}
        more = {"ssd.path": str(directory / "ssd"), "ssd.write_through": "true"}
        self.daemon = stack.enter_context(Daemon(directory, **options, **more))
        self.files: dict[str, object] = {"type": "fs", "root_dir": str(directory / "files")}
        self.pool: dict[str, object] = {
            "type": "KVPoolTier",
            "module_path": "kvpool_client.vllm.tier",
            "socket": self.daemon.socket,
            "timeout_s": TIMEOUT_S,
            "batch_timeout_s": TIMEOUT_S,
        }

    def start(self, *tiers: dict[str, object]) -> Engine:
        """An engine that has computed one prompt."""
        log = self._directory / f"{len(list(self._directory.glob('*.log')))}.log"
        transfer = tiering(*tiers, region_bytes=3 * PROMPT_BYTES, blocks_per_chunk=self._blocks_per_chunk)
        engine = Engine(
            self._model, MODEL, log, transfer=transfer, max_model_len=CONTEXT, max_num_batched_tokens=CONTEXT // 2
        )
        self._stack.enter_context(engine)
        first_token(engine, prompt(8000, PROMPT_TOKENS))
        return engine

    def chunks(self, prompts: int) -> int:
        """Of so many prompts."""
        return prompts * (PROMPT_TOKENS // (BLOCK_TOKENS * self._blocks_per_chunk))


def first_token(engine: Engine, ids: list[int], *, keeps_region: bool = False) -> tuple[float, float]:
    """Seconds until the first token of a prompt that is in no cache of the engine but its region: by the clock, and without
    the engine's waits for a processor. Returns when its jobs have ended."""
    assert engine.ask("forget" if keeps_region else "lose_region")["done"]
    answer = engine.ask("generate", prompts=[ids], tokens=1)
    assert engine.ask("settle")["settled"]
    return float(answer["seconds"]), float(answer["unhindered_seconds"])


def processor_seconds(daemon: Daemon) -> float:
    """Of a daemon so far."""
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shown(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """A median with quartiles."""
    low, middle, high = (scale * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def hit_tokens(engine: Engine) -> int:
    """Tokens that the engine did not have to compute so far."""
    return int(engine.ask("counters")["external_prefix_cache_hits"])


def restarts(bench: Bench, rounds: int) -> None:
    """Times of prompts that an engine has stored which has ended."""
    asked = [prompt(8100 + number, PROMPT_TOKENS) for number in range(2 * rounds)]
    both = bench.start(bench.files, bench.pool)
    cold = [first_token(both, ids)[0] for ids in asked]
    both.close()
    known = bench.chunks(len(asked) + 1)
    wait_until(lambda: int(bench.daemon.stats()["ssd.chunks"]) >= known, "every chunk is on disk", 120.0)
    engines = {"files": bench.start(bench.files), "pool": bench.start(bench.pool)}
    hits = bench.chunks(1) * BLOCK_TOKENS * bench._blocks_per_chunk
    for place, of_round in (("DRAM", asked[:rounds]), ("its disk alone", asked[rounds:])):
        if place != "DRAM":
            assert bench.daemon.stop() == 0
            bench.daemon.start()
            wait_restored(bench.daemon, known)
            wait_served(engines["pool"], bench.daemon)
        took: dict[str, list[float]] = {name: [] for name in (*engines, "region")}
        unhindered: dict[str, list[float]] = {name: [] for name in took}
        of_daemon = processor_seconds(bench.daemon)
        for number, ids in enumerate(of_round):
            for name in sorted(engines, reverse=bool(number % 2)):
                before = hit_tokens(engines[name])
                times = first_token(engines[name], ids)
                assert hit_tokens(engines[name]) - before >= hits, f"{name} has loaded all of it"
                for what, (wall, own) in (
                    (name, times),
                    ("region", first_token(engines[name], ids, keeps_region=True)),
                ):
                    took[what].append(wall)
                    unhindered[what].append(own)
        of_daemon = (processor_seconds(bench.daemon) - of_daemon) / rounds
        for clock, found in (("the clock", took), ("the clock without waits", unhindered)):
            ratios = [pool / files for pool, files in zip(found["pool"], found["files"], strict=True)]
            print(
                f"after a restart of the engine, {PROMPT_TOKENS} tokens, by {clock}: the pool's tier from {place} "
                f"{shown(found['pool'], 1e3)} ms, vLLM's files {shown(found['files'], 1e3)} ms, "
                f"{shown(ratios, 1, 3)} x (meant: {RESTART_MEANT}); floor, from the region {shown(found['region'], 1e3)} ms"
            )
        print(f"  computed {shown(cold, 1e3)} ms; the daemon's processor time {of_daemon * 1e3:.0f} ms")
    for engine in engines.values():
        engine.close()


def misses_and_steps(bench: Bench, rounds: int) -> None:
    """Costs of the tier where it has nothing to load."""
    engine = bench.start(bench.pool)
    ratios: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    for number in range(rounds):
        took: dict[bool, dict[str, float]] = {}
        for is_plugged in (True, False) if number % 2 else (False, True):
            assert engine.ask("forget", of_connector=True)["done"]
            engine.ask("plug_tiers", is_plugged=is_plugged)
            took[is_plugged] = engine.ask("generate", prompts=[prompt(8300 + number, PROMPT_TOKENS)], tokens=1)
            assert engine.ask("settle")["settled"]
        for what, found in ratios.items():
            found.append(took[True][what] / took[False][what])
    assert hit_tokens(engine) == 0
    engine.ask("plug_tiers", is_plugged=True)
    print(
        f"no hits, {PROMPT_TOKENS} tokens: {shown(ratios['seconds'], 1, 4)} x of the time with the region alone "
        f"(meant: {MISS_MEANT}), {shown(ratios['cpu_seconds'], 1, 4)} x of its processor time; {rounds} pairs"
    )
    costs = engine.ask("tier_steps", prompt=prompt(8000, 500), steps=STEPS)
    print(
        f"a step that decodes: {shown(costs['inside'], 1e6)} us inside the tier (meant: {STEP_US_MEANT:.0f}) of "
        f"{shown(costs['steps'], 1e3, 2)} ms; {', '.join(costs['calls'])}"
    )


def main(rounds: int, blocks_per_chunk: int) -> None:
    parts: list[Callable[[Bench, int], None]] = [restarts, misses_and_steps]
    for part in parts:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            print(f"load {os.getloadavg()[0]:.1f}, {blocks_per_chunk} blocks a chunk, {rounds} rounds", flush=True)
            part(Bench(Path(name), stack, blocks_per_chunk, rounds), rounds)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(given[0] if given else 6, given[1] if len(given) > 1 else 8)
