"""Saves after the steps of a real engine: a shared prefix is stored once, a speculative engine stays right, and a step costs
no more than without a pool."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted, wait_served, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.spread import median_bounds
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 32, 512, 48
ROUNDS, STEP_ROUNDS = 5, 150


def whole_chunks(asked: list[list[int]]) -> int:
    """Chunks of all prompts, those that they share counted once."""
    return len({tuple(ids[:end]) for ids in asked for end in range(CHUNK_TOKENS, len(ids) + 1, CHUNK_TOKENS)})


@pytest.mark.parametrize("in_process", [True, False], ids=["one-process", "processes"])
def test_a_batch_that_shares_a_prefix_is_stored_once_and_found_whole(
    in_process: bool, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    first = 1000 + 100 * in_process
    shared = prompt(first, 300)
    asked = [shared + prompt(first + 1 + number, 200 + 31 * number) for number in range(8)]
    expected = plain(GROUPED).tokens(asked, 16)
    engine = start_engine(GROUPED, socket=module_daemon.socket, in_process=in_process, takes_every_hit=in_process)
    before = int(module_daemon.stats()["dram.chunks"])
    assert engine.tokens(asked, 16) == expected
    wait_until(
        lambda: int(module_daemon.stats()["dram.chunks"]) - before == whole_chunks(asked), "every chunk is stored"
    )
    if in_process:
        loaded = counted(engine, "loaded_chunks")
        assert engine.tokens(asked, 16) == expected
        assert (counted(engine, "loaded_chunks") - loaded) * CHUNK_TOKENS <= loadable_tokens(asked)
        hits = engine.ask("counters")
        assert hits["kvpool_hit_tokens/dram"] > 0
    assert not module_daemon.problems()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_speculative_engine_generates_the_same_tokens_when_loads_fail(
    load: str, start_engine: StartEngine, daemon: Daemon, plain: Plain
) -> None:
    words = prompt(1200, 40)
    asked = [words * 9 + prompt(1201 + number, 100) + words for number in range(3)]
    expected = plain(GROUPED).tokens(asked, 24)
    engine = start_engine(
        GROUPED,
        socket=daemon.socket,
        settings={"kvpool.load": load},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    )
    for chunk in (0, 3):
        assert engine.tokens(asked, 24) == expected
        wait_stored(daemon, loadable_tokens(asked[:1]))
        engine.ask("spoil", chunk=chunk)
        assert engine.tokens(asked, 24) == expected
        assert engine.ask("has_spoiled")["spoiled"]
    assert engine.tokens(asked, 24) == expected
    assert daemon.process is not None
    engine.ask("strike", pid=daemon.process.pid, layer=1 if load == "sync" else -1)
    assert engine.tokens(asked, 24) == expected
    assert engine.ask("has_struck")["struck"]
    assert daemon.process.wait(10.0) != 0
    daemon.start()
    wait_served(engine, daemon)
    for _ in range(2):
        assert engine.tokens(asked, 24) == expected
    assert not daemon.problems()


@pytest.fixture(scope="module")
def batched(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    """An engine with room for all requests at once."""
    return start_engine(
        GROUPED,
        socket=module_daemon.socket,
        num_gpu_blocks_override=1024,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048,
    )


@pytest.mark.timed
def test_a_step_that_decodes_costs_what_it_costs_without_a_pool(batched: Engine, report: Callable[[str], None]) -> None:
    """Processor time of the engine's thread, step by step in turns: other load on the machine affects all of them equally."""
    batched.forget()
    asked = [prompt(20_000 + index, PROMPT_TOKENS) for index in range(REQUESTS)]
    costs = batched.ask("steps_in_turns", prompts=asked, rounds=STEP_ROUNDS)
    none = np.asarray(costs["none"])
    bounds = {}
    for name in ("empty", "pool"):
        found = np.asarray(costs[name])
        ratios = found[:, 1] / none[:, 1]
        bounds[name] = median_bounds(ratios.tolist())
        more_ms = np.median(found[:, 1] - none[:, 1]) * 1e3
        report(
            f"{name}: {np.median(found[:, 1]) * 1e3:.2f} ms of processor time a step, not {np.median(none[:, 1]) * 1e3:.2f}, "
            f"{more_ms:.3f} ms more, x{np.median(ratios):.4f} (95 %: {bounds[name][0]:.4f} to {bounds[name][1]:.4f}), "
            f"wall x{np.median(found[:, 0] / none[:, 0]):.4f}; medians of {STEP_ROUNDS} pairs"
        )
    assert bounds["pool"][0] <= 1.02


def test_tokens_come_at_the_same_rate_as_without_a_pool(batched: Engine, report: Callable[[str], None]) -> None:
    """Rounds with and without the connector take turns in one engine, each with new prompts. `copied`:
    without it, while a thread beside the engine copies as many bytes. Time for which others had the processors does not count.
    """
    engine = batched
    copied = PROMPT_TOKENS * GROUPED.layers * 2 * GROUPED.kv_heads * GROUPED.head_dim * np.float32().itemsize
    gaps: dict[str, list[np.ndarray]] = {"none": [], "pool": [], "slow": [], "copied": []}
    wall: dict[str, list[np.ndarray]] = {kind: [] for kind in gaps}
    for number in range(ROUNDS + 1):
        for place, kind in enumerate(gaps):
            first = 10_000 + 100 * (len(gaps) * number + place)
            asked = [prompt(first + index, PROMPT_TOKENS) for index in range(REQUESTS)]
            engine.forget()
            engine.ask("arm", points="client.save.after_reserve:*:delay(50ms)" if kind == "slow" else "")
            engine.ask("plug", is_plugged=kind in ("pool", "slow"))
            beside = copied if kind == "copied" else 0
            found = engine.ask("token_gaps", prompts=asked, tokens=NEW_TOKENS, copied_bytes=beside)
            engine.ask("plug", is_plugged=True)
            engine.ask("arm", points="")
            if number:  # the first round warms the engine up
                gaps[kind].append(np.asarray(found["gaps"]))
                wall[kind].append(np.asarray(found["wall"]))

    def ratio(kind: str, percent: float) -> float:
        """The ratio of the fastest round to that of the engine without a pool: the machine is shared."""
        have, floor = (min(float(np.percentile(each, percent)) for each in gaps[name]) for name in (kind, "none"))
        return have / floor

    for kind, rounds in gaps.items():
        for percent in (50, 99):
            values = np.array([np.percentile(each, percent) * 1e3 for each in rounds])
            against = f", x{ratio(kind, percent):.3f}" if kind != "none" else ""
            by_clock = np.median([np.percentile(each, percent) for each in wall[kind]]) * 1e3
            clocked = f", by the clock {by_clock:.1f}"
            report(f"{kind}: p{percent} {np.median(values):.2f} ms {values.round(1).tolist()}{against}{clocked}")
    assert ratio("pool", 99) <= 1.10
    assert ratio("slow", 99) <= 1.2


@pytest.mark.parametrize("in_process", [True, False], ids=["one-process", "processes"])
def test_an_engine_forgets_its_prefixes_while_saves_are_under_way(
    in_process: bool,
    start_engine: StartEngine,
    module_daemon: Daemon,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does for an update of weights or before it sleeps, where an answer of False is an error of vLLM's."""
    monkeypatch.setenv("KVPOOL_FAILPOINT", "client.save.after_reserve:*:delay(100ms)")
    engine = start_engine(
        GROUPED, socket=module_daemon.socket, in_process=in_process, settings={"kvpool.timeout_s": 5.0}
    )
    asked = [prompt(1300 + 10 * in_process + number, 300) for number in range(8)]
    expected = plain(GROUPED).tokens(asked, 16)
    for _ in range(3):
        assert engine.ask("forget_amid_saves", prompts=asked)["done"]
    assert engine.tokens(asked, 16) == expected
    assert engine.tokens(asked, 16) == expected
    assert not module_daemon.problems()
