"""Hybrid models through the vLLM connector: layers with sliding windows beside full attention, or alone."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.types import Level
from kvpool_client.engines.load_cost import FIRST_PROBE_S, FittedTime
from kvpool_client.vllm.identity.geometry import Geometry
from tests.rigs.blocks.clock import HandClock
from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.hybrid_engine import flip_at_the_next_load
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, prompt

pytestmark = pytest.mark.torch
StartEngine = Callable[..., Any]
PROMPT = 9 * CHUNK + 3
WINDOW = 12
RUN = -(-WINDOW // CHUNK)


def tokens_of(number: int, count: int = PROMPT) -> list[int]:
    return prompt(number, count)


@pytest.mark.parametrize("windows", [(0, 12, 12), (12, 0), (0, 8, 20), (12,)], ids=str)
@pytest.mark.parametrize("shows_tables", [False, True], ids=["tables-kept", "tables-shown"])
def test_a_prompt_is_loaded_up_to_its_last_chunk(
    windows: tuple[int, ...], shows_tables: bool, start: StartEngine, daemon: Daemon
) -> None:
    engine = start(windows=windows, shows_tables=shows_tables)
    assert engine.ask("cold", tokens_of(1)).offers == [0]
    whole = PROMPT // CHUNK
    runs = [whole if not window else min(whole, -(-window // CHUNK)) for window in windows]
    assert int(daemon.stats()["dram.chunks"]) == sum(runs), "windows are stored before the prompt's end alone"
    assert engine.ask("warm", tokens_of(1)).offers == [whole * CHUNK]
    assert engine.scheduler._scheduler.tally.totals.data["hit_tokens_dram"] == whole * CHUNK
    assert start(windows=windows).ask("elsewhere", tokens_of(1)).offers == [whole * CHUNK]
    assert engine.ask("other", tokens_of(2)).offers == [0]


@pytest.mark.parametrize("windows", [(0,), (12,), (0, 12)], ids=str)
def test_layers_of_other_shapes_in_a_group_are_groups_of_the_layout(
    windows: tuple[int, ...], start: StartEngine, daemon: Daemon
) -> None:
    engine = start(windows=windows, is_odd=True)
    engine.ask("cold", tokens_of(1))
    runs = [PROMPT // CHUNK if not window else RUN for window in windows]
    assert int(daemon.stats()["dram.chunks"]) == 2 * sum(runs), "two sizes of blocks in each group"
    assert start(windows=windows, is_odd=True).ask("warm", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]
    assert start(windows=windows).ask("even", tokens_of(1)).offers == [0]


def test_engines_that_divide_the_layers_otherwise_share_nothing(start: StartEngine) -> None:
    in_a_row, in_turn = [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 4], [3, 5]]
    start(layers=in_a_row).ask("cold", tokens_of(1))
    assert start(layers=in_turn).ask("divided otherwise", tokens_of(1)).offers == [0]
    assert start(layers=in_a_row).ask("divided alike", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]


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
    engine.ask("cold", tokens_of(1))
    assert engine.ask("warm", tokens_of(1), new_tokens=2 * CHUNK).offers == [whole]
    assert start(windows=(0, piece), is_local=True).ask("elsewhere", tokens_of(1)).offers == [whole]
    longer = [*tokens_of(1), *tokens_of(2, 4 * CHUNK)]
    engine.ask("longer", longer)
    assert engine.ask("longer again", longer).offers == [len(longer) // CHUNK * CHUNK]
    assert start(windows=(0, piece)).ask("of a sliding window", tokens_of(1)).offers == [0]


@pytest.mark.parametrize(("budget", "is_stored"), [(4096, True), (7, False)])
def test_a_chunk_across_an_end_of_a_piece_is_stored_where_one_step_computes_it(
    budget: int, is_stored: bool, start: StartEngine
) -> None:
    """Computed in two steps, the part of it before that end is let go too early."""
    engine = start(windows=(0, 12), is_local=True, budget=budget)
    engine.ask("cold", tokens_of(1))
    assert engine.ask("warm", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK if is_stored else 0]


@pytest.mark.parametrize("budget", [7, 4096])
def test_a_hit_ends_where_a_lease_has_no_more_holds_and_windows_are_stored_there(
    budget: int, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 4
    monkeypatch.setattr("kvpool_client.verbs.lease_bound.HOLDS_MAX", 2 * (1 + held))
    engine = start(windows=(0, 6 * CHUNK), ranks=2, budget=budget)
    engine.ask("cold", tokens_of(1))
    # Whoever saves the chunks behind it: none of them would be leased.
    monkeypatch.setattr(engine.scheduler._scheduler.pool, "is_being_saved", lambda *_: True)
    assert engine.ask("warm", tokens_of(1)).offers == [held * CHUNK]
    counts = engine.scheduler._scheduler.tally.totals.data
    assert counts["hit_tokens_dram"] == held * CHUNK
    assert counts.get("waits_for_another_save", 0) == 0


def test_a_prompt_of_whole_chunks_goes_on_before_its_last_one(start: StartEngine) -> None:
    engine = start()
    engine.ask("cold", tokens_of(1, 6 * CHUNK))
    assert engine.ask("warm", tokens_of(1, 6 * CHUNK)).offers == [5 * CHUNK]
    assert engine.ask("longer", [*tokens_of(1, 6 * CHUNK), *tokens_of(2, 5)]).offers == [6 * CHUNK]


@pytest.mark.parametrize(
    "budget", [BLOCK - 1, pytest.param(7, marks=pytest.mark.slow), CHUNK, pytest.param(25, marks=pytest.mark.slow)]
)
def test_windows_of_a_prompt_computed_in_pieces_are_stored_while_they_are_there(
    budget: int, start: StartEngine
) -> None:
    engine = start(budget=budget)
    engine.ask("cold", tokens_of(1))
    assert engine.ask("warm", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]
    many = [Request(f"r{number}", tokens_of(number), new_tokens=4) for number in range(3, 5)]
    engine.run(*many)
    again = [Request(f"a{number}", tokens_of(number), new_tokens=4) for number in range(3, 5)]
    engine.run(*again)
    assert [request.offers for request in again] == [[PROMPT // CHUNK * CHUNK]] * 2


def test_a_shared_prefix_is_a_hit_from_the_third_prompt_on(start: StartEngine) -> None:
    engine, shared = start(), tokens_of(1, 5 * CHUNK)
    assert engine.ask("first", shared + tokens_of(2)).offers == [0]
    assert engine.ask("second", shared + tokens_of(3)).offers == [0], "no windows were stored at the junction"
    assert engine.ask("third", shared + tokens_of(4)).offers == [5 * CHUNK]


def test_what_is_decoded_is_loaded_where_everything_is_saved(start: StartEngine) -> None:
    engine = start(kvpool__save="all")
    request = engine.ask("cold", tokens_of(1), new_tokens=3 * CHUNK)
    known = [*request.tokens[: len(request.tokens) // CHUNK * CHUNK], 5]
    assert engine.ask("next", known).offers == [len(known) - 1]


@pytest.mark.parametrize(("windows", "group"), [((0, 12, 12), 0), ((12, 0), 1)], ids=str)
def test_events_have_the_chunks_of_full_attention_and_name_their_group(
    windows: tuple[int, ...], group: int, start: StartEngine, new_daemon: Daemon
) -> None:
    engine = start(windows=windows, kvpool__events=True)
    engine.ask("cold", tokens_of(1))
    events: list[Any] = []

    def have_come(name: str) -> bool:
        engine.step()
        events.extend(event for event in engine.scheduler.take_events() if type(event).__name__ == name)
        return sum(len(event.block_hashes) for event in events) == PROMPT // CHUNK * CHUNK // BLOCK

    wait_until(lambda: have_come("BlockStored"), "every block is published once")
    assert {event.group_idx for event in events} == {group}
    events.clear()
    with new_daemon.admin() as admin:
        admin.flush(None, None)
    wait_until(lambda: have_come("BlockRemoved"), "and removed")
    assert {event.group_idx for event in events} == {group}


def test_fewer_blocks_are_used_with_the_pool_than_to_compute(start: StartEngine) -> None:
    computing, loading = start(), start()
    computing.ask("cold", tokens_of(1))
    loading.ask("warm", tokens_of(1))
    assert loading.blocks_most < computing.blocks_most
    many = start(blocks=2 * computing.blocks_most)
    requests = [Request(f"r{number}", tokens_of(1 + number), new_tokens=3) for number in range(4)]
    for request in requests:
        many.run(request)
    assert many.blocks_most <= computing.blocks_most


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_preempted_request_comes_back_with_the_right_bytes(pieces: int, start: StartEngine) -> None:
    engine = start(budget=2 * CHUNK)
    engine.ask("cold", tokens_of(1))
    request = Request("preempted", tokens_of(1 + pieces), new_tokens=3)
    engine.requests.append(request)
    engine.scheduler.on_new_request(request)
    engine.step_until(lambda: request.num_computed >= pieces * 2 * CHUNK, "it runs")
    engine.preempt(request)
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    engine.settle()
    assert engine.ask("again", tokens_of(1 + pieces)).offers == [PROMPT // CHUNK * CHUNK]


@pytest.mark.parametrize("row", [0, 5, -1], ids=["full", "full-late", "window"])
def test_a_flipped_bit_fails_the_load_and_the_request_computes(row: int, start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    engine.ask("cold", tokens_of(1))
    flip_at_the_next_load(engine, row)
    known = int(daemon.stats()["checksum_failures"])
    failed = engine.ask("failed", tokens_of(1), new_tokens=3)
    assert failed.offers == [PROMPT // CHUNK * CHUNK, 0]
    assert engine.failed == 1
    assert "hit_tokens" not in engine.scheduler._scheduler.tally.totals.data, "the whole prompt is computed"
    wait_until(lambda: int(daemon.stats()["checksum_failures"]) > known, "the daemon knows of the bad chunk")
    engine.ask("once more", tokens_of(1))
    assert engine.ask("whole", tokens_of(1)).offers == [PROMPT // CHUNK * CHUNK]
    assert engine.failed == 1


def test_a_daemon_that_dies_between_lookup_and_load_costs_a_computation(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    engine.ask("cold", tokens_of(1))
    request = Request("warm", tokens_of(1), new_tokens=3)
    engine.requests.append(request)
    engine.scheduler.on_new_request(request)
    kill, half = daemon.kill, engine.worker._worker
    begin = half._begin_load

    def strike(fetch: Any) -> None:
        half._begin_load = begin
        kill()
        begin(fetch)

    half._begin_load = strike
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    assert request.offers == [PROMPT // CHUNK * CHUNK, 0]
    assert engine.failed == 1


def test_a_declined_tier_is_measured_again_by_a_whole_hit(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a hit cannot be loaded; it has more chunks than are loaded of others to measure."""
    monkeypatch.setattr(Geometry, "chunk_bytes", 1 << 20)
    engine, clock, whole = start(kvpool__always_load=False), HandClock(), PROMPT // CHUNK * CHUNK
    engine.ask("cold", tokens_of(1))
    half = engine.scheduler._scheduler
    half._hits._clock, rates = clock, half._rates
    rates._prefill = FittedTime(100.0, least=1.0, most=1e7)  # slow, so that an answer is waited for
    rates._tiers[Level.DRAM] = FittedTime(1e6, least=1e6, most=1e12)
    assert engine.ask("declined", tokens_of(1)).offers == [0]
    counts = half.tally.totals.data
    assert counts["declined_tokens_slower_than_computing_dram"] == whole
    clock.advance(FIRST_PROBE_S)
    assert engine.ask("measured", tokens_of(1)).offers == [whole]
    assert counts["declined_tokens_slower_than_computing_dram"] == whole


@pytest.mark.parametrize("count", [6 * CHUNK, 6 * CHUNK + 1])
def test_a_waiting_request_is_announced_up_to_the_end_that_it_can_load(
    count: int, start: StartEngine, daemon: Daemon
) -> None:
    engine, usable = start(), (count - 1) // CHUNK
    engine.ask("cold", tokens_of(1, count))
    waiting = Request("waiting", tokens_of(1, count))
    engine.scheduler.on_new_request(waiting)
    counts = engine.scheduler._scheduler.tally.totals.data
    engine.step_until(lambda: counts.get("announced_chunks", 0) == usable, "it is announced")
    assert daemon.stats()["announcements"] == 1
    engine.run(waiting)
    assert waiting.offers == [usable * CHUNK]
    assert daemon.stats()["announcements"] == 0, "its lease has used it"
    assert daemon.problems() == []
