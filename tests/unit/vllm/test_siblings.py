"""The vLLM connector beside others in a MultiConnector: requests taken by others leave no hold, and vLLM finds it by name."""

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import store
from tests.rigs.vllm import fake_vllm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


from kvpool_client.connection.promise_line import FRAME_QUESTIONS, Question
from kvpool_client.vllm.scheduler.offers import ANSWER_WAIT_S, IDLE_STEP_S, STEP_S
from tests.rigs.vllm.engine import ScriptedEngine, Tables
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, later_clock, matched, prompt, withhold_answers
from tests.rigs.vllm.specs import LAYERS

TOKENS = prompt(1, 5 * CHUNK + 1)


def offered(engine: ScriptedEngine, request: Request, held: int = 0) -> int:
    """Tokens that the pool offers, once its daemon has answered."""
    answers: list[Any] = []

    def is_expected() -> bool:
        answers.append(matched(engine, request, held)[0])
        if answers[-1] is None:
            engine.step()
        return answers[-1] is not None

    wait_until(is_expected, "the pool has an answer")
    return int(answers[-1])


def wait_nothing_held(engine: ScriptedEngine, daemon: Daemon) -> None:
    """Until no lease and no ticket is left, long before their time to live is over."""
    engine.idle()
    wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["tickets"] == 0, "nothing is held")


def test_the_name_is_registered_wherever_vllm_loads_plugins() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["vllm.general_plugins"]
    entry = importlib.metadata.EntryPoint("kvpool", named["kvpool"], "vllm.general_plugins")
    with fake_vllm.installed():
        registry = fake_vllm.KVConnectorFactory.registry
        for _ in range(2):
            entry.load()()
        assert registry == {"KVPoolConnector": ("kvpool_client.vllm.connector", "KVPoolConnector")}


def test_the_name_is_registered_where_plugins_are_switched_off() -> None:
    with fake_vllm.installed():
        from kvpool_client.vllm import connector

        assert connector.KVPoolConnector is not None
        assert "KVPoolConnector" in fake_vllm.KVConnectorFactory.registry


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_taken_by_another_connector_leaves_no_ticket(start: StartEngine, daemon: Daemon, ranks: int) -> None:
    engine = start(ranks=ranks)
    ask(engine, "cold", TOKENS)
    request = Request("taken", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    assert daemon.stats()["tickets"] == 1
    engine.scheduler.update_state_after_alloc(request, Tables([[]]), 0)
    wait_nothing_held(engine, daemon)


def test_a_request_whose_load_by_another_has_failed_is_offered_nothing(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    request = Request("failed", list(TOKENS))
    request.num_preemptions = 0  # type: ignore[attr-defined]  # as vLLM has it
    assert offered(engine, request) == 5 * CHUNK
    assert offered(engine, request) == 5 * CHUNK, "there was no room yet"
    engine.scheduler.update_state_after_alloc(request, Tables([[]]), 0)
    assert offered(engine, request) == 0
    request.num_preemptions = 1  # type: ignore[attr-defined]
    engine.scheduler._scheduler._offers.are_declined = False  # an answer of more than a millisecond is waited for
    assert offered(engine, request) == 5 * CHUNK


def test_a_request_that_ends_before_it_runs_leaves_no_ticket(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    request = Request("aborted", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    engine.scheduler.request_finished_all_groups(request, ([],))
    wait_nothing_held(engine, daemon)


def test_a_repeated_lookup_keeps_the_ticket_of_the_first(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    request = Request("longer", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    assert offered(engine, request, 2 * CHUNK) == 3 * CHUNK
    engine.step_until(lambda: daemon.stats()["tickets"] == 1, "the first ticket is given back")
    engine.scheduler.request_finished_all_groups(request, ([],))
    wait_nothing_held(engine, daemon)


def test_a_daemon_that_comes_back_has_no_ticket_to_end(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    request = Request("taken", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    daemon.kill()
    engine.scheduler.update_state_after_alloc(request, Tables([[]]), 0)
    engine.scheduler.request_finished_all_groups(request, ([],))
    assert ask(engine, "away", TOKENS).generated == 1


def test_another_models_scheduler_ends_no_ticket(daemon: Daemon) -> None:
    layout = kv.Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
    with daemon.connect(layout) as pool, daemon.connect(layout, model="other") as other:
        keys = pool.keys(list(range(64)))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            ticket = lease.ticket()
        assert other.claim(ticket).chunks == 0
        with pool.claim(ticket) as claimed:
            assert claimed.chunks == 4


def test_where_another_connector_takes_the_request_nobody_waits_for_a_late_answer(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    first, second, third = (Request(name, list(TOKENS)) for name in ("first", "second", "third"))
    assert offered(engine, first) == 5 * CHUNK
    engine.scheduler.update_state_after_alloc(first, Tables([[]]), 0)
    withheld = withhold_answers(engine)
    assert matched(engine, second) == (0, False)
    engine.scheduler.update_state_after_alloc(second, Tables([[]]), 0)
    assert counted(engine, "declined_tokens_late_answer") == 5 * CHUNK
    withheld.end()
    wait_until(lambda: ask(engine, f"own-{counted(engine, 'lookups')}", TOKENS).external > 0, "an offer was taken")
    withhold_answers(engine)
    assert matched(engine, third) == (None, False)


@pytest.mark.parametrize(("are_declined", "answer"), [(True, (0, False)), (False, (None, False))])
def test_a_step_without_time_keeps_no_request_from_another_connectors_offer(
    start: StartEngine, are_declined: bool, answer: tuple[int | None, bool]
) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    offers = engine.scheduler._scheduler._offers
    offers.are_declined, offers._left_ns = are_declined, 0
    lookups = counted(engine, "lookups")
    request = Request("late", list(TOKENS))
    assert matched(engine, request) == answer
    assert counted(engine, "lookups") == lookups


def test_an_answer_without_tokens_does_not_count_as_another_connectors_load(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    line = engine.scheduler._scheduler._promise_line
    ask_daemon = line.ask_promise

    def dropped_meanwhile(hit: kv.Hit) -> Question:
        with daemon.admin() as admin:
            admin.flush(None, None)
        question: Question = ask_daemon(hit)
        return question

    line.ask_promise = dropped_meanwhile
    assert ask(engine, "dropped", TOKENS).external == 0
    line.ask_promise = ask_daemon
    ask(engine, "stored again", TOKENS)
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) >= 5, "it is stored again")
    withhold_answers(engine)
    patient = Request("patient", list(TOKENS))
    engine.forget()
    assert matched(engine, patient) == (None, False)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_in_which_another_connector_loads_is_saved_once_the_load_succeeded(
    start: StartEngine, fails: bool
) -> None:
    """The other load is synchronous and brings nothing; vLLM gets this report at the step's end, or it was right by chance."""
    engine = start()
    request = Request("other's", list(TOKENS), new_tokens=2 * CHUNK)
    engine.arrive(request)
    match, worker, taken = engine.scheduler.get_num_new_matched_tokens, engine.workers[0], 2 * CHUNK

    def claim(asked: Request, held: int) -> tuple[int, bool]:
        assert match(asked, held) == (0, False)
        return taken, False

    update, bad = engine.scheduler.update_state_after_alloc, worker.get_block_ids_with_load_errors
    engine.scheduler.get_num_new_matched_tokens = claim
    engine.scheduler.update_state_after_alloc = lambda asked, blocks, _tokens: update(asked, blocks, 0)
    if fails:
        worker.get_block_ids_with_load_errors = lambda: bad() | set(request.table[: taken // BLOCK])
    else:
        engine._ask = filling(engine, request, taken)
    engine.step()
    assert counted(engine, "waits_for_another_connectors_load") == 1
    assert counted(engine, "saved_chunks") == 0
    worker.get_block_ids_with_load_errors = bad
    engine.scheduler.get_num_new_matched_tokens, engine.scheduler.update_state_after_alloc = match, update
    engine.run(request)
    assert counted(engine, "saved_chunks") >= 5
    assert ask(start(), "fresh", TOKENS, new_tokens=2).external == 5 * CHUNK


def filling(engine: ScriptedEngine, request: Request, taken: int) -> Callable[[Request], bool]:
    """Load the tokens that the other connector has claimed, as soon as the request has blocks."""
    admit = engine._ask

    def ask_and_fill(asked: Request) -> bool:
        is_in = admit(asked)
        for layer in range(LAYERS):
            engine.memory.write(0, 0, layer, asked, range(taken))
        return is_in

    return ask_and_fill


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "--no-async-scheduling"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=False), "use_v2_model_runner": False}, ""),
    ],
    ids=["async-scheduling", "second-runner", "neither"],
)
def test_loads_run_between_steps_where_vllm_does_not_recover_from_others(
    change: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvpool_client.vllm.settings import Settings
    from kvpool_client.vllm.worker.sync_loads import served_loads
    from tests.rigs.vllm.config import config_of

    config = config_of("/x")
    vars(config).update(change)
    settings, reason = served_loads(Settings(load="sync"), config, may_cut_hits=True)
    assert (settings.load, expected in reason) == ("async" if expected else "sync", True)
    assert served_loads(Settings(load="async"), config, may_cut_hits=True) == (Settings(load="async"), "")


def test_an_offer_replaced_by_vllms_own_blocks_does_not_count_as_declined(
    start: StartEngine,
) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    request = Request("computed meanwhile", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK, "there was no room for it"
    assert matched(engine, request, 5 * CHUNK) == (0, False)
    engine.scheduler.update_state_after_alloc(request, Tables([[]]), 0)
    withhold_answers(engine)
    patient = Request("patient", list(TOKENS))
    assert matched(engine, patient) == (None, False)


def test_many_requests_together_delay_the_scheduler_no_longer_than_one(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    clock, line = later_clock(engine), engine.scheduler._scheduler._promise_line
    waits: list[float] = []

    def wait_for_nothing(wait_s: float = 0.0) -> None:
        waits.append(wait_s)
        clock.advance(wait_s)

    withheld = withhold_answers(engine)
    line.receive = wait_for_nothing
    waiting = [Request(f"waits-{number}", list(TOKENS)) for number in range(50)]
    lookups = counted(engine, "lookups")
    for request in waiting:
        assert matched(engine, request) == (None, False)
    assert 0.0 < sum(waits) <= ANSWER_WAIT_S
    assert withheld.count == counted(engine, "lookups") - lookups
    engine.step()
    waits.clear()
    assert matched(engine, waiting[1]) == (None, False)
    assert 0.0 < sum(waits) <= ANSWER_WAIT_S, "the next step may wait again"


def test_what_does_not_fit_a_step_is_left_before_it_is_looked_up(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    clock = later_clock(engine)
    withheld = withhold_answers(engine)
    half = engine.scheduler._scheduler
    find = half._hits.find

    def slow(*arguments: Any) -> Any:
        clock.advance(2 * STEP_S / 5)
        return find(*arguments)

    half._hits.find = slow
    decoding = Request("decodes", prompt(9, CHUNK + 1), new_tokens=100, kv_transfer_params={"load": False})
    engine.arrive(decoding)
    engine.step()
    waiting = [Request(f"waits-{number}", list(TOKENS)) for number in range(60)]
    for step in range(1, 4):
        for request in waiting:
            assert matched(engine, request) == (None, False)
        assert 2 * step <= withheld.count <= 3 * step
        engine.step()
    engine.abort(decoding)
    engine.step()
    asked, fit = withheld.count, int(IDLE_STEP_S / (2 * STEP_S / 5))
    for request in waiting:
        assert matched(engine, request) == (None, False)
    assert fit - 2 <= withheld.count - asked <= fit + 1, "nothing is computed that it would delay"


def test_a_burst_is_asked_about_together(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    line, frames = engine.scheduler._scheduler._promise_line, []
    put = line._put

    def note(record: object, questions: Sequence[Question]) -> None:
        frames.append(len(questions))
        put(record, questions)

    line._put = note
    line.receive = lambda _wait_s=0.0: None
    waiting = [Request(f"waits-{number}", list(TOKENS)) for number in range(100)]
    found = [matched(engine, request) for request in waiting]
    assert found == [(None, False)] * 100
    assert counted(engine, "lookups") == 1 + 100
    del line.receive
    engine.step()
    assert frames == [FRAME_QUESTIONS, 100 - FRAME_QUESTIONS]
    assert [offered(engine, request) for request in waiting] == [5 * CHUNK] * 100
    assert counted(engine, "lookups") == 1 + 100, "none was looked up again"
