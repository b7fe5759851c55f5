"""Cost of a step without work for vLLM's connector: a number of calls that does not grow with the requests.

Calls and instructions of the interpreter are counted, not seconds: they are the same on every machine, and behind a forward
pass each comes from cold memory.
"""

import statistics
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tests.rigs.daemon import wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, counted, prompt
from tests.rigs.vllm.specs import NAMES

# The hooks of a step and of three layers, 16, and of what three of them do: plan, go on without work, and end the step.
CALLS_MAX = 36
# More than the steps of any wait below.
TOKENS, BLOCKS = 2000, 2048
OWN = ("/kvpool_client/", "/kvpool/")


def calls_of(run: Callable[[], object]) -> int:
    """Calls of kvpool's functions on this thread."""
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and any(part in frame.f_code.co_filename for part in OWN)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def instructions_of(run: Callable[[], object]) -> int:
    """Instructions of the interpreter in kvpool's functions on this thread."""
    instructions = 0

    def count(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal instructions
        if event == "call" and not any(part in frame.f_code.co_filename for part in OWN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        instructions += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return instructions


def calls_without_work(engine: ScriptedEngine) -> float:
    """Of most steps, when what was saved before them has been reported: a busy machine is late with it."""
    calls = 0.0

    def are_few() -> bool:
        nonlocal calls
        calls = statistics.median(calls_of(engine.step) for _ in range(9))
        return calls <= CALLS_MAX

    wait_until(are_few, f"most steps cost {CALLS_MAX} calls at most")
    return calls


def decoding(engine: ScriptedEngine, first: int, count: int) -> list[Request]:
    """Requests that have been computed and saved, and have many tokens to decode."""
    requests = [
        Request(f"{first + number}", prompt(first + number, 2 * CHUNK + 1), new_tokens=TOKENS)
        for number in range(count)
    ]
    engine.arrive(*requests)

    def are_saved() -> bool:
        engine.step()
        return counted(engine, "saved_chunks") >= 2 * (first + count)

    wait_until(are_saved, f"{2 * count} chunks are saved")
    return requests


def test_a_step_without_chunks_to_save_costs_few_calls_however_many_requests_run(start: StartEngine) -> None:
    engine = start(kvpool__save="prompt", blocks=BLOCKS)
    found = []
    for first, count in ((0, 1), (1, 6)):
        requests = decoding(engine, first, count)
        found.append(calls_without_work(engine))
        for request in requests:
            engine.abort(request)
    alone, together = found
    assert together == pytest.approx(alone, abs=2)


@pytest.mark.parametrize("save", ["prompt", "all"])
def test_a_request_that_gets_no_block_and_completes_no_chunk_costs_next_to_nothing(
    save: str, start: StartEngine
) -> None:
    """Where decoded tokens are saved it is a look at the number of tokens from which there is something to do."""
    engine = start(kvpool__save=save, blocks=BLOCKS)
    found = []
    for first, count in ((0, 1), (1, 12)):
        requests = decoding(engine, first, count)
        entries = [engine.scheduler._scheduler._requests[request.request_id] for request in requests]
        running = SimpleNamespace(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids=set(),
            new_block_ids=[None] * count,
            num_computed_tokens=[entry.chunks_planned * CHUNK for entry in entries],
        )
        step = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=running,
            num_scheduled_tokens=dict.fromkeys(running.req_ids, 1),
            total_num_scheduled_tokens=count,
        )
        engine.scheduler.build_connector_meta(step)  # looks at each of them once
        found.append(instructions_of(lambda step=step: engine.scheduler.build_connector_meta(step)))  # type: ignore[misc]  # bound now
        for request in requests:
            engine.abort(request)
    alone, together = found
    assert together - alone <= 11 * (0 if save == "prompt" else 32)


def test_a_step_without_work_makes_one_call_for_each_hook_of_a_layer(start: StartEngine) -> None:
    engine = start(kvpool__save="prompt", blocks=BLOCKS)
    decoding(engine, 0, 1)
    calls_without_work(engine)
    worker = engine.workers[0]
    assert calls_of(lambda: worker.wait_for_layer_load(NAMES[0])) == 1
    assert calls_of(lambda: worker.save_kv_layer(NAMES[0], None, None)) == 1


def test_requests_that_end_leave_nothing_to_look_at(start: StartEngine) -> None:
    """Of a request that is aborted with chunks still to come nothing is left that would make later steps look for it."""
    engine = start(kvpool__save="all", blocks=BLOCKS)
    requests = decoding(engine, 0, 3)
    planner = engine.scheduler._scheduler._planner
    assert planner._open
    for request in requests:
        engine.abort(request)
    assert not planner._open


def test_a_save_after_a_step_without_work_is_reported(start: StartEngine) -> None:
    """A request that comes while others decode is saved, and its blocks are released."""
    engine = start(kvpool__save="prompt", blocks=BLOCKS)
    requests = decoding(engine, 0, 1)
    calls_without_work(engine)
    assert all(worker._quiet for worker in engine.workers)
    requests += decoding(engine, 1, 1)
    for request in requests:
        engine.abort(request)
    engine.idle()
    wait_until(lambda: not engine.blocks.held, "no block is held")
    assert counted(engine, "saved_chunks") == 4
    assert counted(engine, "dropped_saves") == 0
