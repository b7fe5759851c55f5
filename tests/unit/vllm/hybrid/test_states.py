"""Recurrent states through the vLLM connector, beside full attention: a state is stored at the ends that vLLM keeps it at."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.hybrid_engine import STATE, flip_at_the_next_load
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, prompt

pytestmark = pytest.mark.torch
StartEngine = Callable[..., Any]
PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK
MIXED = (STATE, STATE, 0)


@pytest.mark.parametrize("windows", [MIXED, (0, STATE), (STATE, 12, 0), (STATE,)], ids=str)
def test_a_prompt_is_loaded_up_to_its_last_chunk(windows: tuple[int, ...], start: StartEngine, daemon: Daemon) -> None:
    engine = start(windows=windows)
    assert engine.ask("cold", prompt(1, PROMPT)).offers == [0]
    runs = {STATE: 1, 0: WHOLE, 12: -(-12 // CHUNK)}
    assert int(daemon.stats()["dram.chunks"]) == sum(runs[window] for window in windows)
    assert engine.ask("warm", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert start(windows=windows).ask("elsewhere", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert engine.ask("longer", [*prompt(1, PROMPT), *prompt(2, 5 * CHUNK)]).offers == [WHOLE * CHUNK]
    assert engine.ask("other", prompt(2, PROMPT)).offers == [0]


def test_states_in_the_middle_are_stored_where_other_prompts_have_gone(start: StartEngine, daemon: Daemon) -> None:
    """A step's end on the shared way is where the third prompt goes on; nothing but a prompt's end is stored elsewhere."""
    engine, shared = start(windows=MIXED, budget=3 * CHUNK), prompt(1, 7 * CHUNK)
    assert engine.ask("first", shared + prompt(2, CHUNK + 1)).offers == [0]
    assert int(daemon.stats()["dram.chunks"]) == 8 + 2
    assert engine.ask("second", shared + prompt(3, CHUNK + 1)).offers == [0]
    assert engine.ask("third", shared + prompt(4, CHUNK + 1)).offers == [6 * CHUNK]
    assert engine.ask("short", [*shared[: 3 * CHUNK], *prompt(5, 3)]).offers == [3 * CHUNK]


@pytest.mark.parametrize(
    "budget", [BLOCK - 1, 7, pytest.param(CHUNK, marks=pytest.mark.slow), pytest.param(25, marks=pytest.mark.slow)]
)
def test_prompts_in_pieces_are_loaded(budget: int, start: StartEngine) -> None:
    engine = start(windows=MIXED, budget=budget)
    for name in ("cold", "warm"):
        many = [Request(f"{name}-{number}", prompt(number, PROMPT), new_tokens=4) for number in range(1, 3)]
        engine.run(*many)
    assert [request.offers for request in many] == [[WHOLE * CHUNK]] * 2


def test_a_prompt_whose_last_block_ends_within_a_chunk_is_no_hit(start: StartEngine) -> None:
    """Only the state at its last whole block is kept: chunks of one block, which are the default, are hits."""
    tokens = prompt(1, 9 * CHUNK + BLOCK + 1)
    halves = start(windows=MIXED)
    halves.ask("cold", tokens)
    assert halves.ask("warm", tokens).offers == [0]
    blocks = start(windows=MIXED, kvpool__chunk_tokens=0)
    blocks.ask("cold", tokens)
    assert blocks.ask("warm", tokens).offers == [9 * CHUNK + BLOCK]


@pytest.mark.parametrize("budget", [4096, 2 * CHUNK])
def test_the_state_of_a_long_step_is_stored_in_a_pool_with_little_room(budget: int, start: StartEngine) -> None:
    """Half of the blocks are held for saves at most: fewer than all parts' of all chunks, more than what is saved."""
    engine = start(windows=(STATE, STATE, STATE, 0), blocks=80, budget=budget)
    offers = [engine.ask(f"r{number}", prompt(1, PROMPT)).offers for number in range(3)]
    assert offers == [[0], [WHOLE * CHUNK], [WHOLE * CHUNK]]


def test_what_is_decoded_is_loaded_where_everything_is_saved(start: StartEngine) -> None:
    engine = start(windows=MIXED, kvpool__save="all")
    request = engine.ask("cold", prompt(1, PROMPT), new_tokens=3 * CHUNK)
    known = [*request.tokens[: len(request.tokens) // CHUNK * CHUNK], 5]
    assert engine.ask("next", known).offers == [len(known) - 1]


def test_a_preempted_request_comes_back_with_the_right_state(start: StartEngine) -> None:
    engine = start(windows=MIXED, budget=2 * CHUNK)
    engine.ask("cold", prompt(1, PROMPT))
    request = Request("preempted", prompt(4, PROMPT), new_tokens=3)
    engine.requests.append(request)
    engine.scheduler.on_new_request(request)
    engine.step_until(lambda: request.num_computed >= 4 * CHUNK, "it runs")
    engine.preempt(request)
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    engine.settle()
    assert engine.ask("again", prompt(4, PROMPT)).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize("row", [0, -1], ids=["first", "last"])
def test_a_flipped_bit_fails_the_load_and_the_request_computes(row: int, start: StartEngine, daemon: Daemon) -> None:
    engine = start(windows=MIXED)
    engine.ask("cold", prompt(1, PROMPT))
    flip_at_the_next_load(engine, row)
    known = int(daemon.stats()["checksum_failures"])
    failed = engine.ask("failed", prompt(1, PROMPT), new_tokens=3)
    assert failed.offers == [WHOLE * CHUNK, 0]
    assert engine.failed == 1
    wait_until(lambda: int(daemon.stats()["checksum_failures"]) > known, "the daemon knows of the bad chunk")
    engine.ask("once more", prompt(1, PROMPT))
    assert engine.ask("whole", prompt(1, PROMPT)).offers == [WHOLE * CHUNK]
    assert engine.failed == 1


def test_states_of_other_shapes_share_nothing(start: StartEngine) -> None:
    start(windows=MIXED).ask("cold", prompt(1, PROMPT))
    other = start(windows=MIXED, of_states={"mamba_type": "mamba2"})
    assert other.ask("other", prompt(1, PROMPT)).offers == [0]


@pytest.mark.parametrize(
    ("of_states", "code"),
    [
        ({"mamba_cache_mode": "none"}, "states_not_kept"),
        ({"num_speculative_blocks": 1}, "speculative_states"),
    ],
)
def test_states_that_cannot_be_stored_are_refused(of_states: dict[str, Any], code: str, start: StartEngine) -> None:
    engine = start(windows=MIXED, of_states=of_states)
    assert engine.ask("cold", prompt(1, PROMPT)).offers == [0]
    assert engine.ask("warm", prompt(1, PROMPT)).offers == [0]
    assert engine.scheduler._refused.totals.data[f"refusals_{code}"] == 1
