"""Saves of a step that loads synchronously on several ranks: held back until the load is verified, then stored, also
those of requests that end with the step. A fresh engine then reads the stored chunks, and every byte of them is checked."""

import pytest

from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, arrive_with_a_promise, ask, counted, lose_next_lease, prompt

LOADED = prompt(1, 3 * CHUNK + 1)
OTHER = prompt(2, 4 * CHUNK + 1)


def step_with_a_load(engine: ScriptedEngine) -> tuple[Request, Request]:
    """One step in which a request loads and another one is computed whole; both end with it."""
    engine.forget()
    loading, computing = Request("loading", LOADED + prompt(3, 2 * CHUNK)), Request("computing", list(OTHER))
    arrive_with_a_promise(engine, loading)
    engine.arrive(computing)
    engine.step()
    return loading, computing


def test_requests_that_end_in_a_step_with_a_load_are_saved_once_the_load_is_verified(
    start: StartEngine,
) -> None:
    engine = start(ranks=2, kvpool__load="sync", kvpool__save="prompt")
    ask(engine, "cold", LOADED)
    loading, computing = step_with_a_load(engine)
    assert not engine.requests
    assert loading.external == 3 * CHUNK
    assert engine.scheduler.has_pending_push_work(), "the engine is to step on"
    engine.idle()
    assert not engine.blocks.held
    fresh = start(ranks=2, kvpool__load="sync")
    for name, request in (("loaded", loading), ("computed", computing)):
        assert ask(fresh, name, request.tokens).external == (len(request.tokens) - 1) // CHUNK * CHUNK


@pytest.mark.parametrize("rank", [0, 1])
def test_saves_based_on_a_failed_load_are_dropped_and_counted(start: StartEngine, rank: int) -> None:
    engine = start(ranks=2, kvpool__load="sync", kvpool__save="prompt")
    ask(engine, "cold", LOADED)
    lose_next_lease(engine, rank)
    loading, computing = step_with_a_load(engine)
    assert engine.recomputed == 1
    assert computing not in engine.requests
    assert counted(engine, "dropped_saves") == 2
    engine.run(loading)
    assert not engine.blocks.held
    fresh = start(ranks=2, kvpool__load="sync")
    assert ask(fresh, "loaded", loading.tokens).external == 5 * CHUNK, "it is computed and stored in a later step"
    assert ask(fresh, "computed", OTHER).external == 0


def test_where_no_block_can_be_held_the_unsaved_chunks_of_a_step_with_a_load_are_counted(
    start: StartEngine,
) -> None:
    engine = start(ranks=2, kvpool__load="sync", kvpool__save="prompt", holds_blocks=False)
    ask(engine, "cold", LOADED)
    step_with_a_load(engine)
    assert not engine.requests
    assert counted(engine, "declined_chunks_beside-a-load") == 4 + 2
    assert ask(engine, "again", OTHER).external == 0
    assert counted(engine, "declined_chunks_beside-a-load") == 4 + 2


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_chunks_that_end_while_half_of_the_blocks_are_held_are_counted(start: StartEngine, new_tokens: int) -> None:
    chunk_blocks, chunks = CHUNK // BLOCK, 6
    engine = start(blocks=8 * chunk_blocks, kvpool__save="prompt")  # blocks of 4 chunks may be held
    request = Request("long", prompt(5, chunks * CHUNK + 1), new_tokens=new_tokens)
    engine.run(request)
    engine.idle()
    stored = counted(engine, "saved_chunks")
    assert stored in ((4,) if new_tokens == 1 else (4, 6)), "what a later step has room for is saved"
    assert counted(engine, "declined_chunks_blocks-held") == chunks - stored


def test_a_reset_drops_held_back_saves_and_succeeds(start: StartEngine) -> None:
    engine = start(ranks=2, kvpool__load="sync", kvpool__save="prompt")
    ask(engine, "cold", LOADED)
    step_with_a_load(engine)
    assert engine.blocks.held, "saves are held back until the load is known to be good"
    assert engine.blocks.reset_prefix_cache()
    assert counted(engine, "dropped_saves") > 0
    engine.idle()
    assert not engine.blocks.held
