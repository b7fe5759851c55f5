"""Resets of the region: prompts that it served are still in the tier, and after a change of weights nothing of the old ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, Survivor
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, Engine, tiering, tokens_of_answer
from tests.engines.vllm.rigs.prompts import prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, STRANGER, Geometry
from tests.engines.vllm.tier.conftest import (
    TOKENS,
    answers,
    answers_with_region,
    connected,
    empty,
    loaded,
    pool_tier,
    settle,
    wait_kept,
    whole_chunks,
)
from tests.rigs.daemon import Daemon, wait_until

HOT_USES = 6
CHUNK_BYTES = 2 * GROUPED.layers * GROUPED.kv_heads * GROUPED.head_dim * 4 * BLOCK_TOKENS


def test_a_prompt_used_from_the_region_outlives_two_that_fill_the_tier(tiered: Survivor, plain: Plain) -> None:
    hot, *others = [prompt(5500 + number, 20 * BLOCK_TOKENS + 5) for number in range(3)]
    expected = plain(GROUPED).tokens([hot], TOKENS)
    room = 45 * CHUNK_BYTES  # two of the prompts, and a little
    with tiered.daemon(**{"dram.capacity": f"{room // 1024}KiB"}) as daemon:
        answers(tiered.engine, [hot])
        before = loaded(tiered.engine)
        for other in others:
            for _ in range(HOT_USES // len(others)):
                assert answers_with_region(tiered.engine, [hot]) == expected
            answers_with_region(tiered.engine, [other])
        assert loaded(tiered.engine) == before, "all uses were of the region"
        assert answers(tiered.engine, [hot]) == expected
        assert loaded(tiered.engine) - before == 20, f"of 20; the tier has {daemon.stats()['dram.chunks']}"


@pytest.mark.parametrize("point", ["client.load.before", "client.load.before_result"])
def test_a_reset_amid_a_load_changes_no_token(point: str, tiered: Survivor, plain: Plain) -> None:
    """vLLM empties the region when the tier has ended its jobs: none of them writes into rows of others later."""
    asked, engine = [prompt(5510, 700)], tiered.engine
    expected = plain(GROUPED).tokens(asked, TOKENS)
    with tiered.daemon() as daemon:
        assert answers(engine, asked) == expected
        wait_kept(daemon, whole_chunks(asked))
        empty(engine)
        engine.ask("arm", points=f"{point}:1:delay(700ms)")
        answer = engine.ask("reset_while_loading", prompt=asked[0], tokens=TOKENS)
        engine.ask("arm", points="")
        assert answer["loads"]
        assert answer["done"]
        assert tokens_of_answer(answer) == expected
        settle(engine)
        before = loaded(engine)
        assert answers(engine, asked) == expected
        assert loaded(engine) == before, "they are of the epoch before"
        wait_kept(daemon, 2 * whole_chunks(asked))
        assert answers(engine, asked) == expected
        assert loaded(engine) - before == whole_chunks(asked)
        wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")


@pytest.fixture
def learner(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    """An engine whose weights a test changes."""
    return connected(start_engine(GROUPED, transfer=tiering(pool_tier(module_daemon.socket))), module_daemon)


def test_nothing_of_the_old_weights_is_loaded_after_a_reset(
    learner: Engine, module_daemon: Daemon, plain: Plain
) -> None:
    """The weights change in place, under the same path, while a store of the old ones is under way."""
    asked, late = prompts(first=5520), prompt(5540, 700)
    old = plain(GROUPED).tokens([*asked, late], TOKENS)
    plain(GROUPED).ask("roll_embeddings", by=1)
    new = plain(GROUPED).tokens([*asked, late], TOKENS)
    plain(GROUPED).ask("roll_embeddings", by=-1)
    assert learner.tokens(asked, TOKENS) == old[:-1]
    settle(learner)
    wait_kept(module_daemon, whole_chunks(asked))
    learner.ask("arm", points="client.save.before_commit:1:delay(1500ms)")
    assert tokens_of_answer(learner.ask("generate", prompts=[late], tokens=TOKENS)) == old[-1:] != new[-1:]
    learner.ask("roll_embeddings", by=1)
    assert learner.ask("forget", of_connector=True)["done"]
    learner.ask("arm", points="")
    for _ in range(2):
        assert answers_with_region(learner, [*asked, late]) == new
        assert loaded(learner) == 0, "nothing is there at first, and then it is in the region"
    wait_kept(module_daemon, whole_chunks([*asked, late]))
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")


@pytest.mark.parametrize(
    ("way", "in_process"), [("reload_weights", False), ("load_weights", True)], ids=["of-vllm", "of-a-trainer"]
)
def test_weights_that_change_without_a_reset_are_stored_under_no_name(
    way: str,
    in_process: bool,
    model: Callable[[Geometry], Path],
    start_engine: StartEngine,
    module_daemon: Daemon,
    plain: Plain,
) -> None:
    """vLLM goes on with KV of the old ones: what it computes from then on is of neither."""
    number = 5560 if in_process else 5570
    first, late, rest = prompt(number, 700), prompt(number + 1, 700), prompt(number + 2, 300)
    transfer = tiering(pool_tier(module_daemon.socket))
    engine = connected(start_engine(GROUPED, transfer=transfer, in_process=in_process), module_daemon)
    before = int(module_daemon.stats()["dram.chunks"])
    assert engine.tokens([first], TOKENS) == plain(GROUPED).tokens([first], TOKENS)
    wait_kept(module_daemon, before + whole_chunks([first]))
    engine.ask("change_weights", path=str(model(STRANGER)), way=way)
    expected = plain(STRANGER).tokens([late, rest], TOKENS)
    assert engine.tokens([late], TOKENS) == expected[:1]
    assert engine.tokens([rest], 1) == [expected[1][:1]], "as many steps later as a store takes"
    assert engine.ask("counters")["kvpool_tier_refused_requests/new_weights"] == 2
    assert int(module_daemon.stats()["dram.chunks"]) == before + whole_chunks([first])
    assert engine.ask("forget", of_connector=True)["done"]
    assert engine.tokens([late, rest], TOKENS) == expected
    wait_kept(module_daemon, before + whole_chunks([first, late, rest]))
    assert not module_daemon.problems()
    engine.close()
