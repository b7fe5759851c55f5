"""The time that a step has for new requests: what is done whatever is left of it, and what is left for later."""

from typing import Any

import pytest

from kvpool_client.vllm.scheduler.offers import IDLE_STEP_NS, STEP_NS
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, matched, prompt

TOKENS = prompt(1, 5 * CHUNK + 1)
LATER, NOTHING = (None, False), (0, False)


def spend_step(engine: ScriptedEngine) -> Any:
    """The step has no time left for new requests, as after hundreds of arrivals; the scheduler's half."""
    half = engine.scheduler._scheduler
    half._offers._left_ns = 0
    return half


def test_requests_beyond_a_steps_time_are_looked_at_later_in_their_order(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=3600.0)
    ask(engine, "cold", TOKENS)
    half = spend_step(engine)
    requests = [Request(f"{number}", list(TOKENS)) for number in range(40)]
    for request in requests:
        engine.scheduler.on_new_request(request)
    assert not half._requests
    engine.step()
    assert list(half._requests) == [request.request_id for request in requests[:32]], "those that are announced"
    for request in requests:
        engine.scheduler.request_finished_all_groups(request, ([],))
    assert not half._waiting
    assert not half._requests


@pytest.mark.parametrize("ends", ["asked", "aborted"])
def test_hints_are_carried_out_however_many_requests_have_come(start: StartEngine, ends: str) -> None:
    engine = start(kvpool__announce=False)
    ask(engine, "cold", TOKENS)
    spend_step(engine)
    request = Request("hinted", list(TOKENS), kv_transfer_params={"decode_priority": 20})
    engine.scheduler.on_new_request(request)
    if ends == "asked":
        engine.run(request)
        answer = request.answer
    else:
        _, answer = engine.scheduler.request_finished_all_groups(request, ([],))
    assert answer is not None


@pytest.mark.parametrize(
    ("params", "options", "is_off"),
    [
        ({"load": False}, {}, False),
        ({"do_remote_prefill": True}, {}, False),
        (None, {"kv_role": "kv_producer"}, False),
        (None, {}, True),
    ],
    ids=["not-to-load", "remote-prefill", "producer", "no-pool"],
)
def test_a_request_that_is_never_loaded_is_not_held_back(
    start: StartEngine, params: dict[str, Any] | None, options: dict[str, Any], is_off: bool
) -> None:
    engine = start(**options)
    half = spend_step(engine)
    half._off = "for a test" if is_off else ""
    request = Request("never", list(TOKENS), kv_transfer_params=params)
    engine.scheduler.on_new_request(request)
    spend_step(engine)
    assert matched(engine, request) == NOTHING
    other = Request("another", list(TOKENS))
    if not options and not is_off:
        assert matched(engine, other) == LATER


def test_a_step_is_idle_only_while_none_before_it_computes(start: StartEngine) -> None:
    engine = start()
    half = engine.scheduler._scheduler
    left = half._offers
    engine.step()
    assert left._left_ns > STEP_NS, "nothing is computed"
    half._times._begun[half._step] = (0, 0, 0, True)
    engine.step()
    assert left._left_ns <= STEP_NS, "the step before has not been reported"
    half._times._begun.clear()
    engine.step()
    assert STEP_NS < left._left_ns <= IDLE_STEP_NS


def test_a_request_that_cannot_be_looked_at_costs_no_load_of_others(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    half = spend_step(engine)
    broken = Request("broken", prompt(2, CHUNK + 1))
    engine.scheduler.on_new_request(broken)
    track = half._track

    def failing(request: Any) -> Any:
        if request is broken:
            raise ZeroDivisionError("a defect")
        return track(request)

    monkeypatch.setattr(half, "_track", failing)
    request = Request("loads", list(TOKENS))
    engine.run(request)
    assert request.external == 5 * CHUNK
    assert counted(engine, "hit_tokens") == 5 * CHUNK
