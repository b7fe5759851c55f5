"""Weights that change in place without a reset: the worker sees it, nothing of the old ones is loaded, nothing is mixed up."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.plan import NO_PLAN, LoadOrder, StepPlan
from kvpool_client.vllm.worker.weight_steps import WeightSteps
from kvpool_client.vllm.worker.weight_watch import WATCHED, watch_weights
from tests.rigs.daemon import wait_until
from tests.rigs.held_weights import HeldWeights, held_weights
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, load_unreported, prompt

__all__ = ["held_weights"]

TOKENS = prompt(1, 5 * CHUNK + 1)


LONGER = [*TOKENS, *prompt(7, 2 * CHUNK)]


def change_weights(engine: ScriptedEngine, *ranks: int) -> None:
    for rank in ranks or range(len(engine.workers)):
        engine.workers[rank].note_new_weights()


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("ranks", [(), (1,)], ids=["all ranks", "one rank"])
def test_nothing_of_the_old_weights_is_loaded_and_nothing_is_saved_before_a_reset(
    start: StartEngine, caplog: pytest.LogCaptureFixture, load: str, ranks: tuple[int, ...]
) -> None:
    engine = start(ranks=2, kvpool__load=load)
    ask(engine, "cold", TOKENS)
    saved = counted(engine, "saved_chunks")
    change_weights(engine, *ranks)
    after = Request("after", list(TOKENS), new_tokens=2)
    engine.blocks.local.clear()  # vLLM's own prefixes are another matter
    engine.run(after)
    assert (after.offers[0], engine.recomputed) == (5 * CHUNK, 1), "found before anybody knew, and not loaded"
    assert counted(engine, "hit_tokens") == 0
    engine.run(Request("new", prompt(2, 3 * CHUNK + 1), new_tokens=2))
    assert counted(engine, "saved_chunks") == saved
    assert "the weights were changed in place, and requests have run since" in caplog.text
    assert ask(engine, "reset", TOKENS).external == 0
    assert ask(engine, "again", TOKENS).external == 5 * CHUNK
    other = start(ranks=2)
    assert ask(other, "old", TOKENS).external == 5 * CHUNK
    assert ask(other, "never stored", prompt(2, 3 * CHUNK + 1)).external == 0


def test_a_change_behind_a_reset_costs_nothing_more(start: StartEngine, caplog: pytest.LogCaptureFixture) -> None:
    """As trainers do it: pause, reset, change, go on."""
    engine = start()
    for number in range(3):
        ask(engine, f"cold-{number}", TOKENS)
        engine.forget()
        assert engine.new_weights()
        change_weights(engine)
        change_weights(engine)
    engine.run(Request("first", list(TOKENS)))
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK
    assert counted(engine, "saved_chunks") == 4 * 5
    assert engine.recomputed == 0
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("is_reset_last", [True, False])
def test_a_reset_and_a_change_between_the_same_steps_count_in_any_order(
    start: StartEngine, is_reset_last: bool
) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    if is_reset_last:
        change_weights(engine)
    assert engine.new_weights()
    if not is_reset_last:
        change_weights(engine)
    assert ask(engine, "first", TOKENS).external == 0
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


def test_a_reset_that_steps_have_followed_does_not_cover_a_change(start: StartEngine) -> None:
    engine = start()
    assert engine.new_weights()
    ask(engine, "between", TOKENS)
    engine.forget()
    change_weights(engine)
    request = Request("after", list(TOKENS))
    engine.run(request)
    assert counted(engine, "hit_tokens") == 0
    assert engine.recomputed == 1


def test_a_step_behind_a_reset_is_enough(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", prompt(2, CHUNK + 1))
    engine.forget()
    assert engine.new_weights()
    running = Request("running", list(TOKENS), new_tokens=2 * CHUNK)
    engine.arrive(running)
    engine.step()
    change_weights(engine)
    engine.run(running)
    assert counted(engine, "saved_chunks") == 1 + 5, "its prompt alone"


def test_with_vllms_own_reset_alone_the_first_step_is_lost(start: StartEngine) -> None:
    """As some trainers do it: change, reset_prefix_cache() without connectors, go on."""
    engine = start(budget=5 * CHUNK + 1)
    ask(engine, "cold", TOKENS)
    for change in range(2):
        change_weights(engine)
        engine.forget()
        saved = counted(engine, "saved_chunks")
        engine.run(Request(f"first-{change}", list(TOKENS)))
        assert counted(engine, "saved_chunks") == saved
        second = prompt(2 + change, 3 * CHUNK + 1)
        engine.run(Request(f"second-{change}", second))
        assert counted(engine, "saved_chunks") == saved + 3
        assert ask(engine, f"third-{change}", second).external == 3 * CHUNK
    assert counted(engine, "hit_tokens") == 2 * 3 * CHUNK


def process_reports_late(engine: ScriptedEngine) -> None:
    """Behind the next plan, as with asynchronous scheduling."""
    reports: list[Any] = []
    scheduler = engine.scheduler
    plan, process = scheduler.build_connector_meta, scheduler.update_connector_output

    def plan_before(step: Any) -> Any:
        made = plan(step)
        while reports:
            process(reports.pop(0))
        return made

    scheduler.build_connector_meta, scheduler.update_connector_output = plan_before, reports.append


@pytest.mark.parametrize("steps", [1, 2])
def test_a_second_change_just_behind_the_first_is_one_of_its_own(start: StartEngine, steps: int) -> None:
    """What vLLM has computed between the two is in its own prefix cache, and of neither the old nor the new weights."""
    engine = start()
    if steps > 1:
        process_reports_late(engine)
    ask(engine, "cold", prompt(2, CHUNK + 1))
    change_weights(engine)
    engine.forget()
    between = Request("between", list(TOKENS), new_tokens=steps)
    engine.arrive(between)
    for _ in range(steps):
        engine.step()
    change_weights(engine)
    saved = counted(engine, "saved_chunks")
    for number in range(3):
        engine.run(Request(f"after-{number}", list(LONGER), new_tokens=2))
    assert counted(engine, "saved_chunks") == saved
    assert ask(engine, "reset", LONGER).external == 0
    assert ask(engine, "again", LONGER).external == 7 * CHUNK


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_ranks_compute_while_one_has_changed_is_not_loaded(start: StartEngine, replicas: int) -> None:
    engine = start(ranks=2, replicas=replicas)
    ask(engine, "cold", prompt(2, CHUNK + 1))
    change_weights(engine, 0)
    engine.forget()
    engine.arrive(Request("mixed", list(TOKENS)))
    engine.step()
    change_weights(engine, 1)
    for number in range(3):
        engine.run(Request(f"after-{number}", list(LONGER)))
    assert ask(engine, "reset", LONGER).external == 0
    assert ask(engine, "again", LONGER).external == 7 * CHUNK


@pytest.mark.parametrize("idle_steps", [0, 1, 3])
@pytest.mark.parametrize("is_announced", [True, False])
def test_steps_without_work_between_a_reset_and_a_change_do_not_count(
    start: StartEngine, caplog: pytest.LogCaptureFixture, idle_steps: int, is_announced: bool
) -> None:
    engine = start(kvpool__save="prompt")
    ask(engine, "cold", TOKENS)
    engine.forget()
    if is_announced:
        assert engine.new_weights()
    for _ in range(idle_steps):
        engine.step()
    change_weights(engine)
    saved = counted(engine, "saved_chunks")
    for number in range(3):
        engine.run(Request(f"after-{number}", prompt(20 + number, 3 * CHUNK + 1), new_tokens=2))
    lost = 0 if is_announced else 1
    assert counted(engine, "saved_chunks") == saved + (3 - lost) * 3
    warnings = [record for record in caplog.records if record.levelno > logging.INFO]
    assert len(warnings) == lost


def test_weights_that_change_before_the_first_step_have_no_name(start: StartEngine) -> None:
    engine, other = start(), start()
    change_weights(engine)
    for number in range(3):
        engine.run(Request(f"new-{number}", prompt(20 + number, 3 * CHUNK + 1)))
    assert counted(engine, "saved_chunks") == 2 * 3, "all but those of the first step"
    engine.forget()
    found = [ask(engine, f"again-{number}", prompt(20 + number, 3 * CHUNK + 1)).external for number in range(3)]
    assert found == [0, 3 * CHUNK, 3 * CHUNK]
    assert ask(other, "other", prompt(22, 3 * CHUNK + 1)).external == 0


def test_a_change_behind_a_step_whose_plan_failed_counts(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    assert engine.new_weights()
    ask(engine, "cold", TOKENS)
    half = engine.scheduler._scheduler
    with monkeypatch.context() as patched:
        patched.setattr(half._times, "begin_step", lambda *_, **__: 1 / 0)
        engine.arrive(Request("unplanned", prompt(9, CHUNK)))
        engine.step()
    change_weights(engine)
    engine.step_until(lambda: not engine.requests, "it has ended")
    engine.run(Request("notices", prompt(10, CHUNK)))
    assert ask(engine, "after", TOKENS).external == 0


def test_a_worker_counts_the_steps_as_the_scheduler_does() -> None:
    weights = WeightSteps()
    weights.note_change()
    assert weights.changed_after == 0, "before the first step"
    load = LoadOrder("loaded", (), 0, 1, ((1,),), b"\0", is_async=True, may_be_cut=True)
    for plan, expected in (
        (NO_PLAN, 1),  # nobody counts yet
        (NO_PLAN, 1),
        (StepPlan(1, is_idle=True), 1),
        (StepPlan(2), 2),
        (StepPlan(3, is_idle=True), 2),
        (StepPlan(4, is_idle=True, loads=(load,)), 4),
        (NO_PLAN, 5),
        (NO_PLAN, 6),
        (StepPlan(7, is_idle=True), 6),
        (StepPlan(8), 8),
    ):
        weights.begin_step(plan)
        weights.note_change()
        weights.note_change()
        assert weights.changed_after == expected, plan


@pytest.mark.parametrize("are_late", [False, True])
def test_after_vllms_own_reset_alone_as_many_steps_are_lost_as_a_report_takes(
    start: StartEngine, are_late: bool
) -> None:
    engine = start(kvpool__save="prompt")
    if are_late:
        process_reports_late(engine)
    ask(engine, "cold", TOKENS)
    change_weights(engine)
    engine.forget()
    for number in range(4):
        engine.arrive(Request(f"new-{number}", prompt(20 + number, 3 * CHUNK + 1), new_tokens=6))
        engine.step()
    engine.step_until(lambda: not engine.requests, "they have ended")
    engine.forget()
    found = [ask(engine, f"again-{number}", prompt(20 + number, 3 * CHUNK + 1)).external for number in range(4)]
    lost = 2 if are_late else 1
    assert found == [0] * lost + [3 * CHUNK] * (4 - lost)


def test_a_request_that_runs_through_a_change_is_saved_no_further(start: StartEngine) -> None:
    engine = start(budget=CHUNK)
    running = Request("running", list(TOKENS), new_tokens=2 * CHUNK)
    engine.arrive(running)
    engine.step()
    engine.step()
    change_weights(engine)
    engine.run(running)
    assert counted(engine, "saved_chunks") <= 2
    other = start()
    assert ask(other, "old", TOKENS).external <= 2 * CHUNK


def test_a_load_that_ended_just_before_is_not_used(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("loaded", list(TOKENS), new_tokens=2)
    load_unreported(engine, request)
    change_weights(engine)
    engine.run(request)
    assert engine.recomputed == 1
    assert counted(engine, "hit_tokens") == 0


def test_weights_that_change_before_they_have_a_name_do_not_get_it(
    start: StartEngine, held_weights: HeldWeights
) -> None:
    engine, other = start(path=held_weights.path), start(path=held_weights.path)
    ask(engine, "early", TOKENS)
    change_weights(engine)
    held_weights.let_begin(engine)
    ask(engine, "named", TOKENS)
    wait_until(lambda: other.scheduler._late is None or other.scheduler._late.is_ready, "the weights are read")
    other.step()
    assert ask(other, "old", TOKENS).external == 0
    assert ask(other, "again", TOKENS).external == 5 * CHUNK


def test_a_change_after_a_late_start_is_behind_the_steps_before_it(
    start: StartEngine, held_weights: HeldWeights
) -> None:
    engine = start(path=held_weights.path)
    engine.run(Request("early", list(TOKENS)))
    held_weights.let_begin(engine)
    change_weights(engine)
    for number in range(3):
        engine.run(Request(f"after-{number}", list(LONGER)))
    assert counted(engine, "saved_chunks") == 0, "vLLM has prefixes of before"
    engine.forget()
    engine.run(Request("reset", list(LONGER)))
    assert counted(engine, "saved_chunks") == 7


def module_of(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def test_each_watched_method_of_vllms_notifies_the_worker_even_if_it_raises(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    called: list[str] = []

    def method_of(name: str) -> Any:
        def method(self: Any, fails: bool = False) -> str:
            called.append(name)
            if fails:
                raise RuntimeError(name)
            return name

        return method

    kinds = []
    for (module, name), methods in WATCHED.items():
        kinds.append(type(name, (), {method: method_of(method) for method in methods}))
        monkeypatch.setitem(sys.modules, module, module_of(module, **{name: kinds[-1]}))
    group = SimpleNamespace(has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: engine.workers[0])
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", group)
    watch_weights()
    watched = [dict(vars(kind)) for kind in kinds]
    watch_weights()
    assert [dict(vars(kind)) for kind in kinds] == watched, "each is wrapped once"
    for kind, methods in zip(kinds, WATCHED.values(), strict=True):
        for method in methods:
            engine.run(Request(f"{method} before", list(TOKENS)))
            weights = engine.workers[0]._worker.weights
            before = weights.changed_after
            assert getattr(kind(), method)() == method
            assert weights.changed_after > before
            engine.run(Request(f"{method} between", list(TOKENS)))
            before = weights.changed_after
            with pytest.raises(RuntimeError, match=method):
                getattr(kind(), method)(fails=True)
            assert weights.changed_after > before
    assert len(called) == 2 * sum(len(methods) for methods in WATCHED.values())


def test_without_vllms_classes_or_a_worker_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in WATCHED:
        monkeypatch.setitem(sys.modules, module, module_of(module, **{name: 5}))
    watch_weights()
    ((module, name), *_), ((method, *_), *_) = WATCHED, WATCHED.values()
    kind: Any = type(name, (), {method: lambda self: 3})
    monkeypatch.setitem(sys.modules, module, module_of(module, **{name: kind}))
    watch_weights()
    assert getattr(kind(), method)() == 3
    others = {"update_weights": staticmethod(lambda: 4), "reload_weights": classmethod(lambda _: 5)}
    kind = type(name, (), others)
    monkeypatch.setitem(sys.modules, module, module_of(module, **{name: kind}))
    watch_weights()
    assert (kind().update_weights(), kind().reload_weights()) == (4, 5), "what is no plain method is left alone"
