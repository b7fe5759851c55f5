"""Greedy tokens are those of an engine without the pool: computed, loaded, loaded by another process, turn after turn."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt, prompts
from tests.engines.vllm.rigs.tiny_models import BRAIN, FULL, GROUPED, Geometry
from tests.rigs.daemon import Daemon

ANSWER = 90
BRAIN_ANSWER = 4


@dataclass
class Pair:
    """A model's engine with the pool, and the tokens that are right."""

    geometry: Geometry
    engine: Engine
    plain: Engine

    def check(self, asked: list[list[int]], count: int = 16) -> list[list[int]]:
        """Both engines generate the same tokens; these tokens."""
        expected = self.plain.tokens(asked, count)
        assert self.engine.tokens(asked, count) == expected
        return expected


@pytest.fixture(scope="module")
def pair_of(start_engine: StartEngine, module_daemon: Daemon, plain: Plain) -> Callable[[Geometry], Pair]:
    """The Pair of a model, started at the first use."""
    pairs: dict[Geometry, Pair] = {}

    def get(geometry: Geometry) -> Pair:
        if geometry not in pairs:
            engine = start_engine(geometry, socket=module_daemon.socket, settings={"kvpool.save": "all"})
            pairs[geometry] = Pair(geometry, engine, plain(geometry))
        return pairs[geometry]

    return get


@pytest.fixture(params=[GROUPED, FULL], ids=lambda geometry: geometry.name)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[Geometry], Pair]) -> Pair:
    return pair_of(request.param)


def test_tokens_are_the_same_computed_and_loaded(pair: Pair) -> None:
    asked = prompts(first=0)
    pair.check(asked)
    before = counted(pair.engine, "loaded_chunks")
    pair.check(asked)
    assert (counted(pair.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_tokens_are_the_same_in_bfloat16(pair_of: Callable[[Geometry], Pair]) -> None:
    pair = pair_of(BRAIN)
    candidates = [ids for first in range(1200, 1260, 20) for ids in prompts(first)]
    asked = pair.plain.clear_prompts(candidates, BRAIN_ANSWER)
    assert len(asked) >= len(candidates) // 8
    pair.check(asked, BRAIN_ANSWER)
    before = counted(pair.engine, "loaded_chunks")
    pair.check(asked, BRAIN_ANSWER)
    assert (counted(pair.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_generated_chunks_are_loaded_in_the_next_turn(pair: Pair) -> None:
    first = [prompt(20, 200), prompt(21, 330)]
    generated = pair.check(first, ANSWER)
    known = [ids + words for ids, words in zip(first, generated, strict=True)]
    before = counted(pair.engine, "loaded_chunks")
    pair.check([ids + prompt(22, 50) for ids in known])
    computed = sum((len(ids) - 1) // CHUNK_TOKENS for ids in known)
    assert counted(pair.engine, "loaded_chunks") - before >= computed > loadable_tokens(first) // CHUNK_TOKENS


@pytest.mark.parametrize(
    ("geometry", "settings", "in_process"),
    [
        pytest.param(GROUPED, {"kvpool.load": "sync"}, True, id="grouped-sync-loads-in-one-process"),
        pytest.param(FULL, {"kvpool.load": "async"}, False, id="full-async-loads-in-three-processes"),
        pytest.param(GROUPED, {"kvpool.load": "sync"}, False, id="grouped-sync-loads-in-three-processes"),
    ],
)
def test_a_fresh_engine_loads_what_another_stored(
    geometry: Geometry,
    settings: dict[str, object],
    in_process: bool,
    pair_of: Callable[[Geometry], Pair],
    start_engine: StartEngine,
    module_daemon: Daemon,
) -> None:
    pair, asked, other = pair_of(geometry), prompts(first=40), prompts(first=60 + 20 * in_process)
    expected = pair.check(asked)
    stored, loaded = module_daemon.stats()["saved_chunks"], loaded_tokens(module_daemon)
    fresh = start_engine(geometry, socket=module_daemon.socket, settings=settings, in_process=in_process)
    assert fresh.tokens(asked, 16) == expected
    wait_loaded(module_daemon, loaded + loadable_tokens(asked))
    assert module_daemon.stats()["saved_chunks"] == stored
    for _ in range(2):
        loaded = loaded_tokens(module_daemon)
        assert fresh.tokens(other, 16) == pair.plain.tokens(other, 16)
    wait_loaded(module_daemon, loaded + loadable_tokens(other))
    assert int(module_daemon.stats()["saved_chunks"]) >= int(stored) + loadable_tokens(other) // CHUNK_TOKENS
    _must_show_what_it_did(fresh, loadable_tokens(asked) + loadable_tokens(other), loadable_tokens(other))
    fresh.close()
    assert not module_daemon.problems()


def _must_show_what_it_did(engine: Engine, loaded: int, saved: int) -> None:
    """Among vLLM's own metrics: tokens loaded, by tier, and chunks saved."""
    shown = engine.ask("counters")
    assert shown["kvpool_hit_tokens/dram"] >= loaded
    assert shown["kvpool_loaded_chunks"] >= loaded // CHUNK_TOKENS
    assert shown["kvpool_saved_chunks"] >= saved // CHUNK_TOKENS
    assert shown["kvpool_lookups"] > 0
    assert shown["prompt_tokens_cached_by_source/host"] >= loaded
    assert not any(name.startswith("kvpool_short_loads") for name in shown)
