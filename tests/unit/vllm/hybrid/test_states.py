"""Recurrent states through the vLLM connector, beside full attention: a state is stored at the ends that vLLM keeps it at."""

from typing import Any

import pytest

from tests.rigs.daemon import Daemon
from tests.rigs.vllm.model import STATE
from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, prompt

PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK
MIXED = (STATE, STATE, 0)


def test_states_in_the_middle_are_stored_where_other_prompts_have_gone(start: StartEngine, daemon: Daemon) -> None:
    """A step's end on the shared way is where the third prompt goes on; nothing but a prompt's end is stored elsewhere."""
    engine, shared = start(windows=MIXED, budget=3 * CHUNK), prompt(1, 7 * CHUNK)
    assert ask(engine, "first", shared + prompt(2, CHUNK + 1)).offers == [0]
    assert int(daemon.stats()["dram.chunks"]) == 8 + 2
    assert ask(engine, "second", shared + prompt(3, CHUNK + 1)).offers == [0]
    assert ask(engine, "third", shared + prompt(4, CHUNK + 1)).offers == [6 * CHUNK]
    assert ask(engine, "short", [*shared[: 3 * CHUNK], *prompt(5, 3)]).offers == [3 * CHUNK]


def test_a_prompt_whose_last_block_ends_within_a_chunk_is_no_hit(start: StartEngine) -> None:
    """Only the state at its last whole block is kept: chunks of one block, which are the default, are hits."""
    tokens = prompt(1, 9 * CHUNK + BLOCK + 1)
    halves = start(windows=MIXED)
    ask(halves, "cold", tokens)
    assert ask(halves, "warm", tokens).offers == [0]
    blocks = start(windows=MIXED, kvpool__chunk_tokens=0)
    ask(blocks, "cold", tokens)
    assert ask(blocks, "warm", tokens).offers == [9 * CHUNK + BLOCK]


@pytest.mark.parametrize("budget", [4096, 2 * CHUNK])
def test_the_state_of_a_long_step_is_stored_in_a_pool_with_little_room(budget: int, start: StartEngine) -> None:
    """Half of the blocks are held for saves at most: fewer than all parts' of all chunks, more than what is saved."""
    engine = start(windows=(STATE, STATE, STATE, 0), blocks=80, budget=budget)
    offers = [ask(engine, f"r{number}", prompt(1, PROMPT)).offers for number in range(3)]
    assert offers == [[0], [WHOLE * CHUNK], [WHOLE * CHUNK]]


def test_states_of_other_shapes_share_nothing(start: StartEngine) -> None:
    ask(start(windows=MIXED), "cold", prompt(1, PROMPT))
    other = start(windows=MIXED, of_states={"mamba_type": "mamba2"})
    assert ask(other, "other", prompt(1, PROMPT)).offers == [0]


@pytest.mark.parametrize(
    ("of_states", "code"),
    [
        ({"mamba_cache_mode": "none"}, "states_not_kept"),
        ({"num_speculative_blocks": 1}, "speculative_states"),
    ],
)
def test_states_that_cannot_be_stored_are_refused(of_states: dict[str, Any], code: str, start: StartEngine) -> None:
    engine = start(windows=MIXED, of_states=of_states)
    assert ask(engine, "cold", prompt(1, PROMPT)).offers == [0]
    assert ask(engine, "warm", prompt(1, PROMPT)).offers == [0]
    assert engine.scheduler._refused.totals.data[f"refusals_{code}"] == 1
