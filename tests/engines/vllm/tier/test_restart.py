"""Chunks that one engine has stored through the tier serve others: a later process, one beside it, none of another shape."""

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, Engine, tiering, tokens_of_answer
from tests.engines.vllm.rigs.prompts import prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, STRANGER, Geometry
from tests.engines.vllm.tier.conftest import (
    TOKENS,
    answers,
    connected,
    loaded,
    pool_tier,
    settle,
    wait_kept,
    whole_chunks,
)
from tests.rigs.daemon import Daemon, wait_until


@pytest.fixture(scope="module")
def later(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return connected(start_engine(GROUPED, transfer=tiering(pool_tier(module_daemon.socket))), module_daemon)


def test_a_new_engine_loads_what_the_one_before_has_stored(
    start_engine: StartEngine, module_daemon: Daemon, plain: Plain, request: pytest.FixtureRequest
) -> None:
    """The first one ends while a store is under way: what that had not stored is computed."""
    asked, late = prompts(first=5000), prompt(5020, 700)
    *expected, of_late = plain(GROUPED).tokens([*asked, late], TOKENS)
    first = connected(start_engine(GROUPED, transfer=tiering(pool_tier(module_daemon.socket))), module_daemon)
    assert first.tokens(asked, TOKENS) == expected
    settle(first)
    wait_kept(module_daemon, whole_chunks(asked))
    first.ask("arm", points="client.save.after_reserve:1:delay(1500ms)")
    first.ask("generate", prompts=[late], tokens=4)
    first.ask("shut_down")
    assert not first.has_region(), "nothing of the tier holds the region"
    first.close()
    second: Engine = request.getfixturevalue("later")
    assert second.tokens(asked, TOKENS) == expected
    assert loaded(second) == whole_chunks(asked)
    shown = second.ask("counters")
    assert shown["external_prefix_cache_hits"] == whole_chunks(asked) * BLOCK_TOKENS
    assert shown["kvpool_tier_loaded_chunks"] == whole_chunks(asked)
    assert answers(second, [late]) == [of_late]
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")
    assert not module_daemon.problems()


def test_two_engines_work_at_once_and_one_that_is_killed_leaves_its_chunks(
    later: Engine, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    """One of them in two processes, as a server has them: there the scheduler steps by itself until its jobs have ended."""
    transfer = tiering(pool_tier(module_daemon.socket))
    server = connected(start_engine(GROUPED, transfer=transfer, in_process=False), module_daemon)
    engines, common, before = (later, server), prompts(first=5100), int(module_daemon.stats()["dram.chunks"])
    asked = [[*common, prompt(5120 + number, 400)] for number in range(2)]
    expected = [plain(GROUPED).tokens(each, TOKENS) for each in asked]
    for _ in range(2):
        for engine, each in zip(engines, asked, strict=True):
            engine.forget()
            engine.send("generate", prompts=each, tokens=TOKENS)
        assert [tokens_of_answer(engine.answer()) for engine in engines] == expected
    settle(later)
    wait_kept(module_daemon, before + whole_chunks([*common, *(each[-1] for each in asked)]))
    assert server.ask("counters")["kvpool_tier_saved_chunks"] > 0
    server.kill()
    known = loaded_tokens(module_daemon)
    assert answers(later, asked[1]) == expected[1]
    wait_loaded(module_daemon, known + whole_chunks(asked[1]) * BLOCK_TOKENS)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")
    assert not module_daemon.problems()


@pytest.mark.parametrize(("geometry", "blocks_per_chunk"), [(STRANGER, 1), (GROUPED, 2)], ids=["weights", "chunks"])
def test_other_weights_and_chunks_of_another_size_find_nothing(
    geometry: Geometry,
    blocks_per_chunk: int,
    later: Engine,
    start_engine: StartEngine,
    module_daemon: Daemon,
    plain: Plain,
) -> None:
    asked = prompts(first=5200)
    assert answers(later, asked) == plain(GROUPED).tokens(asked, TOKENS)
    transfer = tiering(pool_tier(module_daemon.socket), blocks_per_chunk=blocks_per_chunk)
    other = connected(start_engine(geometry, transfer=transfer), module_daemon)
    expected = plain(geometry).tokens(asked, TOKENS)
    assert answers(other, asked) == expected
    assert loaded(other) == 0
    assert answers(other, asked) == expected
    assert loaded(other) == sum(len(ids) // BLOCK_TOKENS // blocks_per_chunk for ids in asked)
    other.close()
