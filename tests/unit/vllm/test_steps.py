"""Cost of a step without work for vLLM's connector: a number of calls that does not grow with the requests.

Calls are counted, not seconds: they are the same on every machine, and behind a forward pass each comes from cold memory.
"""

import statistics
import sys
from types import FrameType

import pytest

from tests.rigs.daemon import wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, counted, prompt

# The hooks of a step and of three layers, and the work of two of them: update block tables, and end the step.
CALLS_MAX = 64
# More than the steps of any wait below.
TOKENS, BLOCKS = 2000, 2048
OWN = ("/kvpool_client/", "/kvpool/")


def calls_of_a_step(engine: ScriptedEngine) -> int:
    """Calls of kvpool's functions on this thread in one step of the engine."""
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and any(part in frame.f_code.co_filename for part in OWN)

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


def calls_without_work(engine: ScriptedEngine) -> float:
    """Of most steps, when what was saved before them has been reported: a busy machine is late with it."""
    calls = 0.0

    def are_few() -> bool:
        nonlocal calls
        calls = statistics.median(calls_of_a_step(engine) for _ in range(9))
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


def test_a_save_after_a_step_without_work_is_reported(start: StartEngine) -> None:
    """A request that comes while others decode is saved, and its blocks are released."""
    engine = start(kvpool__save="prompt", blocks=BLOCKS)
    requests = decoding(engine, 0, 1)
    calls_without_work(engine)
    assert all(worker._is_quiet for worker in engine.workers)
    requests += decoding(engine, 1, 1)
    for request in requests:
        engine.abort(request)
    engine.idle()
    wait_until(lambda: not engine.blocks.held, "no block is held")
    assert counted(engine, "saved_chunks") == 4
    assert counted(engine, "dropped_saves") == 0
