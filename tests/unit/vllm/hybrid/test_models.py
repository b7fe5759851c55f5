"""Models of every kind of layers through the vLLM connector: full attention, sliding windows, recurrent states, and mixes.

What holds for all of them. Where layers have windows or states alone, see `test_windows` and `test_states`.
"""

from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm.model import STATE
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, flip_at_the_next_load, prompt

PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK
PLAIN, WINDOWS, STATES = (0,), (0, 12, 12), (STATE, STATE, 0)
Model = tuple[int, ...]


def slow(*values: Any) -> Any:
    """A case of the long form."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "shows_tables"),
    [
        *((model, shows) for model in (WINDOWS, (12, 0), (0, 8, 20), (12,)) for shows in (False, True)),
        *((model, False) for model in (PLAIN, STATES, (0, STATE), (STATE, 12, 0), (STATE,))),
    ],
    ids=str,
)
def test_a_prompt_is_loaded_up_to_its_last_chunk(
    model: Model, shows_tables: bool, start: StartEngine, daemon: Daemon
) -> None:
    engine = start(windows=model, shows_tables=shows_tables)
    assert ask(engine, "cold", prompt(1, PROMPT)).offers == [0]
    runs = [1 if window == STATE else min(WHOLE, -(-window // CHUNK)) or WHOLE for window in model]
    assert int(daemon.stats()["dram.chunks"]) == sum(runs), "windows and states are stored before its end alone"
    assert ask(engine, "warm", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert counted(engine, "hit_tokens_dram") == WHOLE * CHUNK
    assert ask(start(windows=model), "elsewhere", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert ask(engine, "longer", [*prompt(1, PROMPT), *prompt(2, 5 * CHUNK)]).offers == [WHOLE * CHUNK]
    assert ask(engine, "other", prompt(2, PROMPT)).offers == [0]


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        *((WINDOWS, budget) for budget in (BLOCK - 1, CHUNK)),
        *((STATES, budget) for budget in (BLOCK - 1, 7)),
        *(slow(*case) for case in ((WINDOWS, 7), (WINDOWS, 25), (STATES, CHUNK), (STATES, 25))),
    ],
    ids=str,
)
def test_prompts_computed_in_pieces_are_loaded(model: Model, budget: int, start: StartEngine) -> None:
    engine = start(windows=model, budget=budget)
    for name in ("cold", "warm"):
        many = [Request(f"{name}-{number}", prompt(number, PROMPT), new_tokens=4) for number in range(1, 3)]
        engine.run(*many)
    assert [request.offers for request in many] == [[WHOLE * CHUNK]] * 2


@pytest.mark.parametrize("model", [PLAIN, WINDOWS, STATES], ids=str)
def test_what_is_decoded_is_loaded_where_everything_is_saved(model: Model, start: StartEngine) -> None:
    engine = start(windows=model, kvpool__save="all")
    request = ask(engine, "cold", prompt(1, PROMPT), new_tokens=3 * CHUNK)
    known = [*request.tokens[: len(request.tokens) // CHUNK * CHUNK], 5]
    assert ask(engine, "next", known).offers == [len(known) - 1]


@pytest.mark.parametrize(("model", "chunks"), [(WINDOWS, 2), (WINDOWS, 6), (STATES, 4)], ids=str)
def test_a_preempted_request_comes_back_with_the_right_bytes(model: Model, chunks: int, start: StartEngine) -> None:
    engine = start(windows=model, budget=2 * CHUNK)
    ask(engine, "cold", prompt(1, PROMPT))
    request = Request("preempted", prompt(1 + chunks, PROMPT), new_tokens=3)
    engine.arrive(request)
    engine.step_until(lambda: request.num_computed >= chunks * CHUNK, "it runs")
    engine.preempt(request)
    engine.run(request)
    assert ask(engine, "again", prompt(1 + chunks, PROMPT)).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize(
    ("model", "row"), [*((WINDOWS, row) for row in (0, 5, -1)), (STATES, 0), (STATES, -1)], ids=str
)
def test_a_flipped_bit_fails_the_load_and_the_request_computes(
    model: Model, row: int, start: StartEngine, daemon: Daemon
) -> None:
    engine = start(windows=model)
    ask(engine, "cold", prompt(1, PROMPT))
    flip_at_the_next_load(engine, row)
    known = int(daemon.stats()["checksum_failures"])
    assert ask(engine, "failed", prompt(1, PROMPT), new_tokens=3).offers == [WHOLE * CHUNK, 0]
    assert engine.recomputed == 1
    assert counted(engine, "hit_tokens") == 0, "the whole prompt is computed"
    wait_until(lambda: int(daemon.stats()["checksum_failures"]) > known, "the daemon knows of the bad chunk")
    ask(engine, "once more", prompt(1, PROMPT))
    assert ask(engine, "whole", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert engine.recomputed == 1
