"""Times at which the vLLM connector saves: batches that share a prefix, saves that outlive their step, saves under way while
requests end, are aborted or preempted. A fresh engine then reads the stored chunks, and every byte of them is checked."""

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvpool_client.vllm.worker.save_task import SaveTask
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, being_saved, counted, later_clock, lose_next_lease, prompt

TOKENS = prompt(1, 5 * CHUNK + 1)
SHARED = prompt(2, 3 * CHUNK)


class Gate(threading.Event):
    """What saves wait for; `waiting`: those that have come."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[SaveTask] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No save begins before it is set."""
    opened, begin = Gate(), SaveTask.open

    def wait(task: SaveTask) -> None:
        opened.waiting.append(task)
        opened.wait(600.0)
        begin(task)

    monkeypatch.setattr(SaveTask, "open", wait)
    yield opened
    opened.set()


def declined(engine: ScriptedEngine) -> dict[str, float]:
    """The chunks that any worker declined or dropped, by counter."""
    data = [worker._worker.tally.totals.data for worker in engine.workers]
    return {name: each[name] for each in data for name in each if name.startswith(("declined_chunks", "dropped"))}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("holds_blocks", [True, False])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_each_chunk_of_a_batch_that_shares_a_prefix_is_stored_once(
    start: StartEngine, holds_blocks: bool, ranks: int, new_tokens: int
) -> None:
    engine = start(holds_blocks=holds_blocks, ranks=ranks, blocks=256)
    asked = [SHARED + prompt(10 + number, 2 * CHUNK + 1) for number in range(6)]
    asked += [asked[0][: 4 * CHUNK] + prompt(20 + number, CHUNK + 1) for number in range(3)]
    engine.run(*(Request(f"cold-{number}", ids, new_tokens=new_tokens) for number, ids in enumerate(asked)))
    whole = {tuple(ids[:end]) for ids in asked for end in range(CHUNK, len(ids), CHUNK)}
    assert declined(engine) == {}
    assert counted(engine, "saved_chunks") == len(whole) * ranks
    fresh = start(ranks=ranks)
    for number, ids in enumerate(asked):
        assert ask(fresh, f"warm-{number}", ids).external == len(ids) // CHUNK * CHUNK


def _has_left(engine: ScriptedEngine, request: Request) -> bool:
    return request not in engine.requests


@pytest.mark.parametrize("holds_blocks", [True, False])
def test_chunks_that_another_engine_writes_are_stored_when_it_gives_up(start: StartEngine, holds_blocks: bool) -> None:
    engine = start(holds_blocks=holds_blocks, kvpool__wait_s=0.0, kvpool__timeout_s=600.0, kvpool__save="prompt")
    request = Request("cold", list(TOKENS), new_tokens=200)
    with being_saved(engine, TOKENS[: 2 * CHUNK]) as save:
        engine.arrive(request)
        engine.step_until(lambda: request.generated > 3, "it computes meanwhile")
        assert counted(engine, "saved_chunks") == 0
        save.abort()
    engine.step_until(lambda: counted(engine, "saved_chunks") == 5, "all of it is stored")
    engine.abort(request)
    engine.idle()
    assert ask(start(), "warm", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("holds_blocks", [True, False])
def test_the_wait_for_another_engines_save_is_bounded_by_the_setting(start: StartEngine, holds_blocks: bool) -> None:
    engine = start(holds_blocks=holds_blocks, kvpool__wait_s=0.0, kvpool__timeout_s=600.0)
    clock, saver = later_clock(engine), engine.workers[0]._worker._saver
    with being_saved(engine, TOKENS[: 2 * CHUNK]):
        request = Request("cold", list(TOKENS), new_tokens=2)
        engine.arrive(request)
        engine.step_until(lambda: request not in engine.requests, "it has ended")
        if holds_blocks:
            engine.step_until(lambda: bool(saver._waiting), "its save waits for the other one")
        clock.advance(601.0)
        engine.idle()
        assert not engine.scheduler.has_pending_push_work()
        assert not engine.blocks.held
    assert counted(engine, "saved_chunks") == 0


def test_a_request_computes_and_ends_while_its_save_is_under_way(start: StartEngine, gate: Gate) -> None:
    engine = start(kvpool__timeout_s=600.0)
    request = Request("cold", list(TOKENS), new_tokens=3)
    engine.arrive(request)
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    assert engine.scheduler.has_pending_push_work()
    assert len(engine.blocks.held) == 10
    gate.set()
    engine.idle()
    assert not engine.blocks.held
    assert counted(engine, "saved_chunks") == 5
    assert ask(start(), "warm", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["preempt", "abort", "end"])
def test_blocks_of_a_save_under_way_are_not_reused(start: StartEngine, gate: Gate, how: str, ranks: int) -> None:
    """Blocks are so few that others need those of the ended request; a wrong save would store their bytes."""
    engine = start(kvpool__timeout_s=600.0, blocks=24, ranks=ranks, kvpool__save="prompt")
    request = Request("gone", list(TOKENS), new_tokens=1 if how == "end" else 9)
    engine.arrive(request)
    engine.step_until(lambda: request.num_computed + request.generated > 0, "it computes")
    if how == "preempt":
        engine.preempt(request)
        engine.requests.remove(request)  # it is taken up again when the others have ended
    if how == "abort":
        engine.abort(request)
    others = [Request(f"other-{number}", prompt(30 + number, 5 * BLOCK), new_tokens=2) for number in range(2)]
    for other in others:
        engine.arrive(other)
        engine.step_until(partial(_has_left, engine, other), "another one has ended")
    gate.set()
    engine.idle()
    if how == "preempt":
        engine.requests.append(request)
        engine.run(request)
    assert declined(engine) == {}
    assert ask(start(ranks=ranks), "warm", TOKENS).external == 5 * CHUNK


def test_a_save_that_is_slow_is_dropped_and_counted(start: StartEngine, gate: Gate) -> None:
    engine = start(kvpool__timeout_s=600.0, kvpool__save="prompt")
    clock = later_clock(engine)
    requests = [Request(f"cold-{number}", prompt(number, 3 * CHUNK + 1), new_tokens=2) for number in range(4)]
    engine.arrive(*requests)
    engine.step_until(lambda: not engine.requests, "they have ended")
    wait_until(lambda: len(gate.waiting) == 2, "the threads have taken up two")
    clock.advance(601.0)
    gate.set()
    engine.idle()
    # Two had been taken up by the threads; the others are not begun.
    assert counted(engine, "dropped_saves") == 2
    assert counted(engine, "saved_chunks") == 6
    assert not engine.blocks.held


def test_a_hung_daemon_holds_no_block_longer_than_the_setting(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__timeout_s=0.3, kvpool__wait_s=0.0)
    ask(engine, "before", prompt(3, CHUNK))
    daemon.signal(signal.SIGSTOP)
    for number in range(3):
        assert ask(engine, f"cold-{number}", prompt(4 + number, 3 * CHUNK), new_tokens=2).generated == 2
    assert not engine.blocks.held
    daemon.signal(signal.SIGCONT)


def test_no_more_blocks_are_held_than_a_share_and_the_rest_is_saved_later(start: StartEngine, gate: Gate) -> None:
    engine = start(blocks=14, kvpool__timeout_s=600.0, kvpool__save="prompt")
    request = Request("cold", list(TOKENS), new_tokens=6)
    engine.arrive(request)
    engine.step_until(lambda: request.generated > 0, "its prompt is computed")
    assert len(engine.blocks.held) == 6
    gate.set()

    def are_stored() -> bool:
        """One step when nothing is being copied: the request has few of them."""
        under_way = [future for worker in engine.workers for _, future in worker._worker._saver._running]
        if not all(future.done() for future in under_way):
            return False
        engine.step()
        return counted(engine, "saved_chunks") == 5

    wait_until(are_stored, "all of it is stored")
    assert engine.blocks.held_most <= 7
    engine.step_until(lambda: request not in engine.requests, "it has ended")


def test_an_engine_without_idle_steps_ends_its_saves_with_its_last_request(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        import vllm.envs

        from kvpool_client.vllm import connector

        patch.setattr(vllm.envs, "VLLM_ENABLE_V1_MULTIPROCESSING", False)
        patch.setattr(connector, "worker_here", lambda: started[0].workers[0] if started else object())
        started: list[ScriptedEngine] = []
        started.append(start())
        engine = started[0]
        first, last = Request("first", list(TOKENS)), Request("last", prompt(7, 4 * CHUNK), new_tokens=3)
        engine.arrive(first, last)
        engine.step_until(lambda: last not in engine.requests, "they have ended")
        assert not engine.blocks.held
        assert engine.blocks.held_most > 0
        assert counted(engine, "saved_chunks") == 9


def test_prompts_alone_are_saved_unless_more_is_asked_for(start: StartEngine) -> None:
    engine = start(kvpool__save="prompt")
    asked = {
        "nothing": (None, 3),
        "all": ({"save": "all"}, 5),
        "kept": ({"decode_priority": 20}, 5),
        "kept, but": ({"decode_priority": 20, "save": "prompt"}, 3),
        "none": ({"save": False}, 0),
        "true": ({"save": True}, 3),
        "wrong": ({"save": "everything"}, 3),
        "odd": ({"save": ["all"]}, 3),
    }
    for number, (name, (params, chunks)) in enumerate(asked.items()):
        before = counted(engine, "saved_chunks")
        request = ask(engine, name, prompt(number, 3 * CHUNK + 1), new_tokens=2 * CHUNK, kv_transfer_params=params)
        assert counted(engine, "saved_chunks") - before == chunks, name
    outcomes = request.answer["kvpool_hints"]["outcomes"]
    assert [(entry["action_type"], entry["status"]) for entry in outcomes] == [("save", "rejected")]
    assert "['all'], expected one of 'prompt', 'all', True, False" in outcomes[0]["reason"]


def test_an_engine_that_saves_everything_saves_less_on_request(start: StartEngine) -> None:
    engine = start(kvpool__save="all")
    ask(engine, "prompt", TOKENS, new_tokens=2 * CHUNK, kv_transfer_params={"save": "prompt"})
    assert counted(engine, "saved_chunks") == 5


def test_a_request_may_ask_for_nothing_to_be_loaded(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    assert ask(engine, "computed", TOKENS, kv_transfer_params={"load": False}).external == 0
    assert ask(engine, "wrong", TOKENS, kv_transfer_params={"load": "no"}).external == 5 * CHUNK
    assert ask(engine, "loaded", TOKENS, kv_transfer_params={"load": True}).external == 5 * CHUNK


def test_chunks_are_stored_at_the_configured_occurrence(start: StartEngine) -> None:
    engine = start(kvpool__save_after=3, kvpool__save="prompt")
    for number in range(2):
        ask(engine, f"{number}", SHARED + prompt(50 + number, CHUNK + 1))
        assert counted(engine, "saved_chunks") == 0
    ask(engine, "third", SHARED + prompt(60, CHUNK + 1))
    assert counted(engine, "saved_chunks") == 3
    assert ask(engine, "again", SHARED + prompt(60, CHUNK + 1)).external == 3 * CHUNK
    assert counted(engine, "saved_chunks") == 3
    ask(engine, "third of its own", SHARED + prompt(60, CHUNK + 1))
    assert counted(engine, "saved_chunks") == 4


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_speculative_engine_gets_a_failed_load_in_its_step(start: StartEngine, load: str) -> None:
    engine = start(is_speculative=True, kvpool__load=load)
    ask(engine, "cold", TOKENS)
    assert ask(engine, "warm", TOKENS, new_tokens=3).external == 5 * CHUNK
    lose_next_lease(engine)
    longer = TOKENS + prompt(2, 3 * CHUNK)
    ask(engine, "failing", longer, new_tokens=2 * CHUNK + 2)
    assert engine.recomputed == 1
    assert ask(start(), "fresh", longer + prompt(3, 1)).external == 8 * CHUNK


def test_layers_of_a_draft_are_in_place_before_the_model_asks_for_them(start: StartEngine) -> None:
    """The draft's layers are read after vLLM has asked for the outcome of the loads."""
    engine = start(is_speculative=True, kvpool__load="sync")
    worker = engine.workers[0]
    wait, names = worker.wait_for_layer_load, []

    def waits_but_for_the_draft(name: str) -> None:
        names.append(name)
        if not name.startswith("model.layers.2"):
            wait(name)

    def end(save: Callable[[], None] = worker.wait_for_save) -> None:
        wait("model.layers.2.self_attn.attn")
        save()

    worker.wait_for_layer_load, worker.wait_for_save = waits_but_for_the_draft, end
    ask(engine, "cold", TOKENS, new_tokens=3)
    for name in ("warm", "again"):
        assert ask(engine, name, TOKENS, new_tokens=3).external == 5 * CHUNK
    assert engine.recomputed == 0
    assert names


def test_the_functions_that_holding_blocks_needs_are_looked_up_in_the_engine() -> None:
    with fake_vllm.installed():
        from kvpool_client.vllm.identity import engine_process

        assert engine_process.is_stepped_while_idle()
        assert engine_process.worker_here() is None
    assert not engine_process.is_stepped_while_idle()


def test_a_consumer_holds_no_block(start: StartEngine) -> None:
    engine = start(kv_role="kv_consumer")
    ask(engine, "cold", TOKENS, new_tokens=3)
    assert engine.blocks.held_most == 0
    assert counted(engine, "saved_chunks") == 0


def test_a_plan_that_fails_holds_no_block(start: StartEngine) -> None:
    engine = start()
    planner = engine.scheduler._scheduler._planner
    order = planner._order
    made: list[object] = []

    def failing(*arguments: object) -> object:
        if made:
            raise ZeroDivisionError("a defect")
        made.append(order(*arguments))
        return made[0]

    planner._order = failing
    first, second = (Request(f"{number}", prompt(number, 3 * CHUNK + 1), new_tokens=3) for number in range(2))
    engine.run(first, second)
    assert engine.blocks.held_most > 0
    assert not engine.blocks.held
    assert counted(engine, "saved_chunks") == 0


def test_a_step_with_little_measured_time_reports_nothing(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    half = engine.workers[0]
    assert half.get_kv_connector_stats() is not None
    half.build_connector_worker_meta()
    assert half.get_kv_connector_stats() is None
    half._worker.tally.count("engine_seconds", 1.0)
    assert half.get_kv_connector_stats().data["engine_seconds"] >= 1.0
