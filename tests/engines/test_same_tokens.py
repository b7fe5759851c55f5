"""Greedy tokens are those of an engine without the pool: computed, loaded, loaded by another process, turn after turn."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.daemon import Daemon
from tests.engines.conftest import StartEngine, counted, loaded_tokens, wait_loaded, wait_stored
from tests.engines.engine import CHUNK_TOKENS, Engine
from tests.engines.prompts import loadable_tokens, prompt, prompts
from tests.engines.tiny_models import BRAIN, FULL, GROUPED, Geometry

ANSWER = 90
BRAIN_ANSWER = 4
Plain = Callable[[Geometry], Engine]


@dataclass
class Pair:
    """A model's engine with the pool, and the tokens that are right."""

    geometry: Geometry
    engine: Engine
    plain: Engine

    def check(self, asked: list[list[int]], count: int = 16) -> list[list[int]]:
        """Both engines say the same; what they say."""
        expected = self.plain.tokens(asked, count)
        assert self.engine.tokens(asked, count) == expected
        return expected


@pytest.fixture(scope="module", params=[GROUPED, FULL], ids=lambda geometry: geometry.name)
def pair(request: pytest.FixtureRequest, start_engine: StartEngine, module_daemon: Daemon, plain: Plain) -> Pair:
    geometry: Geometry = request.param
    return Pair(geometry, start_engine(geometry, socket=module_daemon.socket), plain(geometry))


def test_tokens_are_the_same_computed_and_loaded(pair: Pair, module_daemon: Daemon) -> None:
    asked = prompts(first=0)
    pair.check(asked)
    before = counted(pair.engine, "loaded_chunks")
    pair.check(asked)
    assert (counted(pair.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_tokens_are_the_same_in_bfloat16(start_engine: StartEngine, module_daemon: Daemon, plain: Plain) -> None:
    candidates = [ids for first in range(1200, 1300, 20) for ids in prompts(first)]
    asked = plain(BRAIN).clear_prompts(candidates, BRAIN_ANSWER)
    assert len(asked) >= len(candidates) // 8
    pair = Pair(BRAIN, start_engine(BRAIN, socket=module_daemon.socket), plain(BRAIN))
    pair.check(asked, BRAIN_ANSWER)
    before = counted(pair.engine, "loaded_chunks")
    pair.check(asked, BRAIN_ANSWER)
    assert (counted(pair.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_what_was_generated_is_loaded_in_the_next_turn(pair: Pair, module_daemon: Daemon) -> None:
    first = [prompt(20, 200), prompt(21, 330)]
    said = pair.check(first, ANSWER)
    known = [ids + words for ids, words in zip(first, said, strict=True)]
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
    start_engine: StartEngine,
    plain: Plain,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    asked = prompts(first=40)
    expected = plain(geometry).tokens(asked, 16)
    with Daemon(tmp_path_factory.mktemp("daemon"), **{"dram.capacity": "256MiB"}) as daemon:
        options = {"socket": daemon.socket, "settings": settings, "in_process": in_process}
        first = start_engine(geometry, **options)
        assert first.tokens(asked, 16) == expected
        wait_stored(daemon, loadable_tokens(asked))
        assert first.tokens(asked, 16) == expected
        wait_loaded(daemon, loadable_tokens(asked))
        first.close()
        stored, loaded = daemon.stats()["stored_chunks"], loaded_tokens(daemon)
        fresh = start_engine(geometry, **options)
        assert fresh.tokens(asked, 16) == expected
        wait_loaded(daemon, loaded + loadable_tokens(asked))
        assert daemon.stats()["stored_chunks"] == stored
        fresh.close()
        assert not daemon.problems()
