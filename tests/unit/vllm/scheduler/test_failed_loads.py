"""Saves after a load that failed: what was lost by it once more, and nothing of the other requests."""

from threading import Event
from typing import Any

import pytest

from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, arrive_with_a_promise, ask, counted, lose_next_lease, prompt

LOADED = prompt(1, 3 * CHUNK)
FAILING = LOADED + prompt(3, 2 * CHUNK + 1)
LONG = 1000  # tokens to generate: more than any test steps


def running(engine: ScriptedEngine, count: int) -> list[Request]:
    """Requests that decode, with their prompts of 4 chunks saved."""
    requests = [Request(f"running-{number}", prompt(10 + number, 4 * CHUNK + 1), LONG) for number in range(count)]
    engine.arrive(*requests)
    engine.step_until(
        lambda: all(request.generated for request in requests) and not engine.scheduler.has_pending_push_work(),
        "they decode, and their prompts are saved",
    )
    return requests


def orders_of(engine: ScriptedEngine) -> dict[str, list[range]]:
    """The chunks that each request's orders name from now on."""
    planner = engine.scheduler._scheduler._planner
    plan = planner.plan
    named: dict[str, list[range]] = {}

    def noted(*arguments: Any) -> Any:
        orders = plan(*arguments)
        for order in orders:
            named.setdefault(order.request_id, []).append(range(order.first_chunk, len(order.hashes)))
        return orders

    planner.plan = noted
    return named


def fail_behind_two_chunks(engine: ScriptedEngine) -> None:
    """Asynchronous loads bring two chunks from now on."""
    carry_out = engine.workers[0]._worker._carry_out

    def two_came(fetch: Any) -> Any:
        outcome = carry_out(fetch)
        return type(outcome)(outcome.wanted, 2, "corrupt", outcome.seconds, outcome.tiers, outcome.cost_s)

    engine.workers[0]._worker._carry_out = two_came


def end(engine: ScriptedEngine, *requests: Request) -> None:
    for request in requests:
        engine.abort(request)
    engine.idle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_failed_asynchronous_load_only_its_own_chunks_are_offered_again(start: StartEngine, ranks: int) -> None:
    engine = start(ranks=ranks, blocks=256, kvpool__save="prompt")
    ask(engine, "cold", [*LOADED, 1])
    engine.forget()
    others = running(engine, 6)
    orders = orders_of(engine)
    lose_next_lease(engine, ranks - 1)
    failing = Request("failing", list(FAILING), new_tokens=3)
    engine.arrive(failing)
    engine.step_until(lambda: failing not in engine.requests, "it has ended")
    assert engine.recomputed == 1
    assert orders == {"failing": [range(5)]}
    end(engine, *others)
    assert counted(engine, "dropped_saves") == 0
    assert ask(start(ranks=ranks), "fresh", FAILING).external == 5 * CHUNK


def test_chunks_that_came_before_the_failed_one_are_not_offered_again(start: StartEngine) -> None:
    engine = start(kvpool__save="prompt")
    ask(engine, "cold", [*LOADED, 1])
    engine.forget()
    fail_behind_two_chunks(engine)
    orders = orders_of(engine)
    engine.run(Request("failing", list(FAILING), new_tokens=3))
    assert engine.recomputed == 1
    assert orders == {"failing": [range(2, 5)]}


def test_a_preempted_request_whose_load_fails_is_saved_on(start: StartEngine) -> None:
    """The numbers of its earlier blocks may be among the bad ones by now, in any order."""
    engine = start(kvpool__save="prompt")
    request = Request("preempted", list(FAILING), LONG)
    engine.arrive(request)
    engine.step_until(
        lambda: bool(request.generated) and not engine.scheduler.has_pending_push_work(), "its prompt is saved"
    )
    before = list(request.table)
    engine.preempt(request)
    fail_behind_two_chunks(engine)
    orders = orders_of(engine)
    engine.step_until(lambda: request.state == "loading", "it loads")
    assert before[0] in request.table[2 * 2 :], "the bad ones have the number of its first block"
    engine.step_until(lambda: request.state == "running", "it is computed")
    engine.step()
    assert engine.recomputed == 1
    assert orders == {"preempted": [range(2, 5)]}
    end(engine, request)


def test_a_load_that_is_cancelled_with_its_request_has_nothing_offered_again(start: StartEngine) -> None:
    engine = start(blocks=256, kvpool__save="prompt")
    ask(engine, "cold", [*LOADED, 1])
    engine.forget()
    others = running(engine, 3)
    orders, is_aborted = orders_of(engine), Event()
    pool = engine.workers[0]._worker.pool
    claim = pool.claim

    def claim_late(ticket: bytes) -> Any:
        assert is_aborted.wait(600.0)
        return claim(ticket)

    pool.claim = claim_late
    aborted = Request("aborted", list(FAILING))
    engine.arrive(aborted)
    engine.step_until(lambda: aborted.state == "loading", "it loads")
    engine.abort(aborted)
    engine.step()
    is_aborted.set()
    engine.step_until(lambda: aborted not in engine.requests, "its load has ended")
    for _ in range(3):
        engine.step()
    assert orders == {}
    end(engine, *others)


@pytest.mark.parametrize("holds_blocks", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_given_up_beside_a_failed_synchronous_load_is_offered_again_and_nothing_else(
    start: StartEngine, ranks: int, holds_blocks: bool
) -> None:
    engine = start(ranks=ranks, blocks=256, holds_blocks=holds_blocks, kvpool__load="sync", kvpool__save="prompt")
    ask(engine, "cold", [*LOADED, 1])
    engine.forget()
    others = running(engine, 3)
    lose_next_lease(engine, ranks - 1)
    failing, beside = Request("failing", list(FAILING), LONG), Request("beside", prompt(4, 4 * CHUNK + 1), LONG)
    arrive_with_a_promise(engine, failing)
    engine.arrive(beside)
    engine.step()
    assert engine.recomputed == 1
    orders = orders_of(engine)
    engine.step_until(lambda: failing.generated > 3 and beside.generated > 3, "they decode")
    assert orders == {"failing": [range(5)], "beside": [range(4)]}
    end(engine, failing, beside, *others)
    fresh = start(ranks=ranks, kvpool__load="sync")
    for request, chunks in ((failing, 5), (beside, 4)):
        prompt_tokens = request.tokens[: request.num_prompt_tokens]
        assert ask(fresh, request.request_id, prompt_tokens).external == chunks * CHUNK


def test_of_requests_that_share_a_bad_block_only_the_one_that_computes_it_again_is_saved_on(
    start: StartEngine,
) -> None:
    """The others go on behind it, maybe before it is there. Orders that can only fail name every block of a request."""
    engine = start(blocks=256, kvpool__load="sync", kvpool__save="all")
    ask(engine, "cold", FAILING)
    engine.forget()
    first, second = (
        Request(name, LOADED + prompt(7 + place, 1), LONG) for place, name in enumerate(["first", "second"])
    )
    apart = Request("apart", prompt(9, 4 * CHUNK + 1), LONG)
    for request in (first, second, apart):
        request.kv_transfer_params = {"load": False}
        engine.arrive(request)
        engine.step()
    assert second.held == 3 * CHUNK
    failing = Request("failing", list(FAILING), LONG)
    arrive_with_a_promise(engine, failing, 3 * CHUNK)
    engine.scheduler._scheduler._note_allocation = lambda *_: 1 // 0
    engine.step()
    del engine.scheduler._scheduler._note_allocation
    assert (failing.held, failing.external) == (3 * CHUNK, 2 * CHUNK)
    assert (first.num_computed, failing.num_computed) == (0, 3 * CHUNK)
    assert second.num_computed > 3 * CHUNK
    orders = orders_of(engine)
    requests = [first, second, apart, failing]
    engine.step_until(lambda: all(request.generated > 2 * CHUNK for request in requests), "they decode")
    assert orders.keys() == {"first", "apart"}
    assert min(chunks.start for chunks in orders["first"]) == 0
    assert min(chunks.start for chunks in orders["apart"]) == 4, "its prompt is not offered again"
    end(engine, *requests)
