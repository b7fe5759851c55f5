"""Hybrid models through the vLLM connector: layers with sliding windows beside full attention, or alone."""

from typing import Any

import pytest

from kvpool.states import Level
from kvpool_client.engines.load_cost import FIRST_PROBE_S, FittedTime
from kvpool_client.vllm.identity.geometry import Geometry
from tests.rigs.clock import HandClock
from tests.rigs.daemon import Daemon
from tests.rigs.vllm.model import MIXED
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt

PROMPT = 9 * CHUNK + 3
WINDOW = 12
RUN = -(-WINDOW // CHUNK)


def tokens_of(number: int, count: int = PROMPT) -> list[int]:
    return prompt(number, count)


@pytest.mark.parametrize("windows", [(0,), (12,), (0, 12)], ids=str)
def test_layers_of_other_shapes_in_a_group_are_groups_of_the_layout(
    windows: tuple[int, ...], start: StartEngine, daemon: Daemon
) -> None:
    engine = start(windows=windows, is_odd=True)
    ask(engine, "cold", tokens_of(1))
    runs = [PROMPT // CHUNK if not window else RUN for window in windows]
    assert int(daemon.stats()["dram.chunks"]) == 2 * sum(runs), "two sizes of blocks in each group"
    assert ask(start(windows=windows, is_odd=True), "warm", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]
    assert ask(start(windows=windows), "even", tokens_of(1)).offers == [0]


def test_engines_that_divide_the_layers_otherwise_share_nothing(start: StartEngine) -> None:
    in_a_row, in_turn = [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 4], [3, 5]]
    ask(start(windows=MIXED, layers=in_a_row), "cold", tokens_of(1))
    assert ask(start(windows=MIXED, layers=in_turn), "divided otherwise", tokens_of(1)).offers == [0]
    assert ask(start(windows=MIXED, layers=in_a_row), "divided alike", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]


@pytest.mark.parametrize(
    ("piece", "budget"),
    [
        (CHUNK, 7),
        (5 * CHUNK, 4096),
        (100 * CHUNK, 7),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((CHUNK, 4096), (5 * CHUNK, 7), (100 * CHUNK, 4096))),
    ],
    ids=str,
)
def test_layers_that_attend_within_pieces_of_a_prompt_are_loaded(piece: int, budget: int, start: StartEngine) -> None:
    engine, whole = start(windows=(0, piece), is_local=True, budget=budget), PROMPT // CHUNK * CHUNK
    ask(engine, "cold", tokens_of(1))
    assert ask(engine, "warm", tokens_of(1), new_tokens=2 * CHUNK).offers == [whole]
    assert ask(start(windows=(0, piece), is_local=True), "elsewhere", tokens_of(1)).offers == [whole]
    longer = [*tokens_of(1), *tokens_of(2, 4 * CHUNK)]
    ask(engine, "longer", longer)
    assert ask(engine, "longer again", longer).offers == [len(longer) // CHUNK * CHUNK]
    assert ask(start(windows=(0, piece)), "of a sliding window", tokens_of(1)).offers == [0]


@pytest.mark.parametrize(("budget", "is_stored"), [(4096, True), (7, False)])
def test_a_chunk_across_an_end_of_a_piece_is_stored_where_one_step_computes_it(
    budget: int, is_stored: bool, start: StartEngine
) -> None:
    """Computed in two steps, the part of it before that end is let go too early."""
    engine = start(windows=(0, 12), is_local=True, budget=budget)
    ask(engine, "cold", tokens_of(1))
    assert ask(engine, "warm", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK if is_stored else 0]


@pytest.mark.parametrize("budget", [7, 4096])
def test_a_hit_ends_where_a_lease_has_no_more_holds_and_windows_are_stored_there(
    budget: int, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 4
    monkeypatch.setattr("kvpool_client.verbs.lease_bound.HOLDS_MAX", 2 * (1 + held))
    engine = start(windows=(0, 6 * CHUNK), ranks=2, budget=budget)
    ask(engine, "cold", tokens_of(1))
    # Whoever saves the chunks behind it: none of them would be leased.
    monkeypatch.setattr(engine.scheduler._scheduler.pool, "is_being_saved", lambda *_: True)
    assert ask(engine, "warm", tokens_of(1)).offers == [held * CHUNK]
    assert counted(engine, "hit_tokens_dram") == held * CHUNK
    assert counted(engine, "waits_for_another_save") == 0


def test_a_prompt_of_whole_chunks_goes_on_before_its_last_one(start: StartEngine) -> None:
    engine = start(windows=MIXED)
    ask(engine, "cold", tokens_of(1, 6 * CHUNK))
    assert ask(engine, "warm", tokens_of(1, 6 * CHUNK)).offers == [5 * CHUNK]
    assert ask(engine, "longer", [*tokens_of(1, 6 * CHUNK), *tokens_of(2, 5)]).offers == [6 * CHUNK]


def test_a_shared_prefix_is_a_hit_from_the_third_prompt_on(start: StartEngine) -> None:
    engine, shared = start(windows=MIXED), tokens_of(1, 5 * CHUNK)
    assert ask(engine, "first", shared + tokens_of(2)).offers == [0]
    assert ask(engine, "second", shared + tokens_of(3)).offers == [0], "no windows were stored at the junction"
    assert ask(engine, "third", shared + tokens_of(4)).offers == [5 * CHUNK]


@pytest.mark.parametrize(("windows", "group"), [((0, 12, 12), 0), ((12, 0), 1)], ids=str)
def test_events_have_the_chunks_of_full_attention_and_name_their_group(
    windows: tuple[int, ...], group: int, start: StartEngine, new_daemon: Daemon
) -> None:
    engine = start(windows=windows, kvpool__events=True)
    ask(engine, "cold", tokens_of(1))

    def named(name: str) -> list[Any]:
        return [event for event in engine.events if type(event).__name__ == name]

    def have_come(name: str) -> bool:
        return sum(len(event.block_hashes) for event in named(name)) == PROMPT // CHUNK * CHUNK // BLOCK

    engine.step_until(lambda: have_come("BlockStored"), "every block is published once")
    assert {event.group_idx for event in named("BlockStored")} == {group}
    with new_daemon.admin() as admin:
        admin.flush(None, None)
    engine.step_until(lambda: have_come("BlockRemoved"), "and removed")
    assert {event.group_idx for event in named("BlockRemoved")} == {group}


def test_fewer_blocks_are_used_with_the_pool_than_to_compute(start: StartEngine) -> None:
    computing, loading = start(windows=MIXED), start(windows=MIXED)
    ask(computing, "cold", tokens_of(1))
    ask(loading, "warm", tokens_of(1))
    assert loading.blocks_most < computing.blocks_most
    many = start(windows=MIXED, blocks=2 * computing.blocks_most)
    requests = [Request(f"r{number}", tokens_of(1 + number), new_tokens=3) for number in range(4)]
    for request in requests:
        many.run(request)
    assert many.blocks_most <= computing.blocks_most


def test_a_declined_tier_is_measured_again_by_a_whole_hit(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a hit cannot be loaded; it has more chunks than are loaded of others to measure."""
    monkeypatch.setattr(Geometry, "chunk_bytes", 1 << 20)
    engine, clock, whole = start(windows=MIXED, kvpool__always_load=False), HandClock(), PROMPT // CHUNK * CHUNK
    ask(engine, "cold", tokens_of(1))
    half = engine.scheduler._scheduler
    half._hits._clock, rates = clock, half._rates
    rates._prefill = FittedTime(100.0, least=1.0, most=1e7)  # slow, so that an answer is waited for
    rates._tiers[Level.DRAM] = FittedTime(1e6, least=1e6, most=1e12)
    assert ask(engine, "declined", tokens_of(1)).offers == [0]
    counts = half.tally.totals.data
    assert counts["declined_tokens_slower_than_computing_dram"] == whole
    clock.advance(FIRST_PROBE_S)
    assert ask(engine, "measured", tokens_of(1)).offers == [whole]
    assert counts["declined_tokens_slower_than_computing_dram"] == whole


@pytest.mark.parametrize("count", [6 * CHUNK, 6 * CHUNK + 1])
def test_a_waiting_request_is_announced_up_to_the_end_that_it_can_load(
    count: int, start: StartEngine, daemon: Daemon
) -> None:
    engine, usable = start(windows=MIXED), (count - 1) // CHUNK
    ask(engine, "cold", tokens_of(1, count))
    waiting = Request("waiting", tokens_of(1, count))
    engine.scheduler.on_new_request(waiting)
    engine.step_until(lambda: counted(engine, "announced_chunks") == usable, "it is announced")
    assert daemon.stats()["announcements"] == 1
    engine.run(waiting)
    assert waiting.offers == [usable * CHUNK]
    assert daemon.stats()["announcements"] == 0, "its lease has used it"
    assert daemon.problems() == []
