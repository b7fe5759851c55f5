"""Waits for chunks that are just being saved, of prompts that vLLM holds in part: only for what would bring more than that."""

from typing import Any

import pytest

from tests.rigs.daemon import wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, being_saved, counted, later_clock, matched, prompt

TOKENS = prompt(1, 7 * CHUNK + 1)
LATER = (None, False)
NOTHING = (0, False)


def first_answer(engine: ScriptedEngine, held_tokens: int, **params: Any) -> tuple[int | None, bool]:
    """The answer about a question on TOKENS of which vLLM holds so much."""
    request = Request("question", list(TOKENS), kv_transfer_params=params)
    answer: tuple[int | None, bool] = matched(engine, request, held_tokens)
    engine.scheduler.request_finished_all_groups(request, ([],))
    return answer


@pytest.mark.parametrize(
    ("saved", "held_tokens", "expected"),
    [
        (range(5), 5 * CHUNK, NOTHING),  # all of it is held
        (range(5), 5 * CHUNK + BLOCK, NOTHING),
        (range(5), 4 * CHUNK + BLOCK, LATER),  # the rest of the last chunk would be new
        (range(5), 4 * CHUNK, LATER),
        (range(5), 0, LATER),
        (range(6), 5 * CHUNK, LATER),  # there is more than is held
        (range(5, 6), 5 * CHUNK, NOTHING),  # not found without the chunks before it
    ],
)
def test_only_what_brings_more_than_the_engine_holds_is_waited_for(
    start: StartEngine, saved: range, held_tokens: int, expected: tuple[int | None, bool]
) -> None:
    engine = start(kvpool__wait_s=600.0)
    with being_saved(engine, TOKENS[: saved.stop * CHUNK], saved.start):
        assert first_answer(engine, held_tokens) == expected
    assert counted(engine, "waits_for_another_save") == (expected == LATER)


def test_a_second_question_is_not_held_back_by_the_save_of_the_first(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    document = TOKENS[: 5 * CHUNK]
    ask(engine, "first", [*document, 1], kv_transfer_params={"save": False})
    with being_saved(engine, TOKENS[: 5 * CHUNK]):  # as by this engine's worker
        second = Request("second", [*document, *prompt(3, 2 * CHUNK)], kv_transfer_params={"save": False})
        engine.run(second)
    assert (second.held, second.external) == (5 * CHUNK, 0)
    assert counted(engine, "waits_for_another_save") == 0


def test_a_prompt_that_is_saved_elsewhere_is_not_waited_for_where_it_is_held(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    assert first_answer(engine, 7 * CHUNK - BLOCK, load="wait") == LATER
    request = Request("held", TOKENS[: 6 * CHUNK + BLOCK + 1], kv_transfer_params={"load": "wait"})
    assert matched(engine, request, 6 * CHUNK) == NOTHING, "no whole chunk is left"


def test_the_wait_is_no_longer_than_computing_what_the_engine_does_not_hold(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0, kvpool__always_load=False)
    clock = later_clock(engine)
    engine.scheduler._scheduler._rates.add_prefill(1, 1.0)
    request = Request("waiting", list(TOKENS))
    held = 5 * CHUNK
    with being_saved(engine, TOKENS[: 7 * CHUNK]):
        assert matched(engine, request, held) == LATER
        clock.advance(2.0 * CHUNK)
        assert matched(engine, request, held) == NOTHING, "computing it is faster"


def test_what_waits_for_a_save_is_looked_up_again_when_that_has_ended(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    engine.scheduler._scheduler._rates = type(engine.scheduler._scheduler._rates)()  # its prefill is not known
    request = Request("question", list(TOKENS))
    with being_saved(engine, TOKENS[: 5 * CHUNK]) as save:
        lookups = counted(engine, "lookups")
        for _ in range(5):
            assert matched(engine, request) == LATER
        assert counted(engine, "lookups") == lookups + 1
        assert matched(engine, request, 5 * CHUNK) == NOTHING, "vLLM has it now"
        assert matched(engine, request) == LATER
        assert save.commit() is not None

    def is_offered() -> bool:
        engine.step()
        found: bool = matched(engine, request) == (5 * CHUNK, True)
        return found

    wait_until(is_offered, "the saved chunks are offered")
