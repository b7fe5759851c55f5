"""The vLLM connector when things go wrong: every failure is a miss, and no wrong byte is read or stored."""

import logging
import signal
from functools import partial
from threading import Event
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.clock import MonotonicClock
from kvpool.errors import DaemonUnreachable
from kvpool.protocol.records import messages as m
from kvpool_client.engines.load_cost import FittedTime
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.payload import store

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.vllm.engine import ScriptedEngine, Tables
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import (
    CHUNK,
    StartEngine,
    ask,
    being_saved,
    corrupt,
    counted,
    later_clock,
    lose_next_lease,
    matched,
    prompt,
    withhold_answers,
)

TOKENS = prompt(1, 5 * CHUNK + 1)


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_corrupt_chunk_and_all_behind_it_are_computed_again(start: StartEngine, load: str, chunk: int) -> None:
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)
    corrupt(engine, TOKENS, chunk)
    bad: list[int] = []
    take = engine.workers[0].get_block_ids_with_load_errors

    def noted() -> set[int]:
        found: set[int] = take()
        bad.extend(found)
        return found

    engine.workers[0].get_block_ids_with_load_errors = noted
    request = Request("warm", list(TOKENS), new_tokens=3)
    engine.forget()
    engine.requests.append(request)
    while not request.table:
        engine.step()
    table = list(request.table)
    engine.run(request)
    assert engine.recomputed == 1
    assert sorted(bad) == sorted(table[chunk * 2 : 5 * 2])
    assert counted(engine, "hit_tokens") == counted(engine, "hit_tokens_dram") == chunk * CHUNK, "what came before it"
    assert ask(engine, "again", TOKENS).external == 5 * CHUNK
    assert counted(engine, "hit_tokens") == (chunk + 5) * CHUNK
    assert len(engine.scheduler._scheduler._hits_under_way) == 0


def _has_other_epoch(pool: kv.Pool, epoch: bytes) -> bool:
    return pool.connected and pool.epoch != epoch


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("is_corrupt", [False, True])
def test_chunks_stored_after_a_failed_load_are_right(start: StartEngine, load: str, is_corrupt: bool) -> None:
    """The engine has computed on KV that never came; a fresh engine that loads everything sees only right bytes."""
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)
    if is_corrupt:
        corrupt(engine, TOKENS, 1)
    else:
        lose_next_lease(engine)
    longer = TOKENS + prompt(2, 3 * CHUNK)
    ask(engine, "failing", longer, new_tokens=2 * CHUNK + 2)
    assert engine.recomputed == 1
    assert ask(start(), "fresh", longer + prompt(3, 1)).external == 8 * CHUNK


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_shards_failure_does_not_affect_the_other(start: StartEngine, load: str, rank: int) -> None:
    engine = start(ranks=2, kvpool__load=load)
    ask(engine, "cold", TOKENS)
    lose_next_lease(engine, rank)
    longer = TOKENS + prompt(2, 3 * CHUNK)
    ask(engine, "failing", longer, new_tokens=2 * CHUNK + 2)
    assert engine.recomputed == 1
    assert counted(engine, "hit_tokens") == 0, "one shard's KV spares nothing"
    fresh = start(ranks=2)
    assert ask(fresh, "fresh", longer + prompt(3, 1)).external == 8 * CHUNK


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_load_counts_when_its_last_shard_has_ended(start: StartEngine, late: int, failing: int | None) -> None:
    engine = start(ranks=2)
    ask(engine, "cold", TOKENS)
    if failing is not None:
        lose_next_lease(engine, failing)
    pool, other_has_ended = engine.workers[late]._worker.pool, Event()
    claim = pool.claim

    def claim_late(ticket: bytes) -> Any:
        assert other_has_ended.wait(30.0)
        return claim(ticket)

    pool.claim = claim_late
    engine.forget()
    request = Request("warm", list(TOKENS))
    engine.arrive(request)
    engine.step_until(lambda: engine.ranks_with_load(request) == 1, "one shard has ended")
    assert counted(engine, "hit_tokens") == 0
    other_has_ended.set()
    engine.run(request)
    assert counted(engine, "hit_tokens") == counted(engine, "hit_tokens_dram") == (5 * CHUNK if failing is None else 0)
    assert len(engine.scheduler._scheduler._hits_under_way) == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_failing_request_is_not_asked_for_again(start: StartEngine, load: str) -> None:
    """A chunk that always fails to load and is always found by a lookup ends no request and causes no endless loop."""
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)
    pool = engine.workers[0]._worker.pool
    claim = pool.claim

    def lost(ticket: bytes) -> Any:
        claim(ticket).release()
        return claim(b"forged" + ticket)

    pool.claim = lost
    request = ask(engine, "warm", TOKENS)
    assert request.offers == ([5 * CHUNK, 0] if load == "async" else [5 * CHUNK])
    assert engine.recomputed == 1
    assert counted(engine, "short_loads_gone") == 1
    assert counted(engine, "hit_tokens") == 0


def test_an_engine_without_a_daemon_computes_and_picks_the_pool_up(start: StartEngine, daemon: Daemon) -> None:
    daemon.kill()
    engine = start()
    assert ask(engine, "away", TOKENS, new_tokens=3).external == 0
    daemon.start()
    for half in (engine.scheduler._scheduler, engine.workers[0]._worker):
        wait_connected(half.pool)
    line = engine.scheduler._scheduler._promise_line  # a connection of its own
    wait_until(lambda: line.is_connected, "promises can be asked for")
    assert ask(engine, "cold", TOKENS).external == 0
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize(
    "options", [{"kvpool__load": "async"}, {"kvpool__load": "sync"}, {"windows": (0, 12)}], ids=str
)
def test_a_daemon_killed_between_lookup_and_load_is_a_miss(
    start: StartEngine, daemon: Daemon, options: dict[str, Any]
) -> None:
    engine = start(**options)
    ask(engine, "cold", TOKENS)
    engine.on_allocated = daemon.kill
    assert ask(engine, "warm", TOKENS, new_tokens=3).offers[0] == 5 * CHUNK
    assert engine.recomputed == 1


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_daemon_restarted_between_lookup_and_load_gets_no_wrong_bytes(
    start: StartEngine, daemon: Daemon, load: str
) -> None:
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)

    def restart() -> None:
        engine.on_allocated = lambda: None
        daemon.kill()
        daemon.start()
        for half in (engine.scheduler._scheduler, engine.workers[0]._worker):
            wait_until(partial(_has_other_epoch, half.pool, epoch), "a new epoch")

    epoch = engine.scheduler._scheduler.pool.epoch
    engine.on_allocated = restart
    longer = TOKENS + prompt(2, 2 * CHUNK)
    ask(engine, "warm", longer, new_tokens=CHUNK + 2)
    assert engine.recomputed == 1
    ask(start(), "fresh", longer + prompt(3, 1), new_tokens=2)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_daemon_killed_while_saving_leaves_the_engine_alive(start: StartEngine, daemon: Daemon, layer: int) -> None:
    engine = start()
    engine.on_layer = lambda number: daemon.kill() if number == layer and daemon.process.poll() is None else None  # type: ignore[union-attr]
    assert ask(engine, "cold", TOKENS, new_tokens=3).generated == 3


def test_a_hung_daemon_delays_no_request_longer_than_the_setting(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__wait_s=0.05)
    engine.scheduler._scheduler._offers._clock = MonotonicClock()
    ask(engine, "cold", TOKENS)
    engine.forget()
    daemon.signal(signal.SIGSTOP)
    request = Request("late", list(TOKENS))
    engine.arrive(request)
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    daemon.signal(signal.SIGCONT)
    engine.idle()
    assert request.external == 0
    assert counted(engine, "waits_for_the_daemon") == 1
    assert counted(engine, "declined_tokens_late_answer") == 5 * CHUNK


def test_a_scheduler_is_asked_to_retry_while_the_answer_is_missing(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    withheld = withhold_answers(engine)
    request = Request("late", list(TOKENS))
    assert matched(engine, request) == (None, False)
    assert matched(engine, request) == (None, False)
    withheld.deliver()
    assert matched(engine, request) == (5 * CHUNK, True)
    assert matched(engine, request) == (5 * CHUNK, True)
    assert withheld.count == 1


def test_an_answer_that_comes_late_is_taken_where_the_request_has_not_begun(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    clock = later_clock(engine)
    ask(engine, "cold", TOKENS)
    withheld = withhold_answers(engine)
    begun, waiting = (Request(name, list(TOKENS)) for name in ("begun", "waiting"))
    for request in (begun, waiting):
        assert matched(engine, request) == (None, False)
    clock.advance(301.0)
    for request in (begun, waiting):
        assert matched(engine, request) == (0, False)
    engine.scheduler.update_state_after_alloc(begun, Tables([[]]), 0)
    assert counted(engine, "declined_tokens_late_answer") == 5 * CHUNK
    withheld.deliver()
    assert matched(engine, waiting) == (5 * CHUNK, True)
    assert counted(engine, "declined_tokens_late_answer") == 5 * CHUNK


def test_what_is_asked_again_has_all_its_patience_again(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    clock = later_clock(engine)
    ask(engine, "cold", TOKENS)
    withhold_answers(engine)
    request = Request("patient", list(TOKENS))
    assert matched(engine, request) == (None, False)
    clock.advance(301.0)
    assert matched(engine, request, CHUNK) == (None, False), "vLLM holds more: a new question"
    clock.advance(301.0)
    assert matched(engine, request, CHUNK) == (0, False)


@pytest.mark.parametrize(("rate", "is_patient"), [(1.0, True), (1e6, False)])
def test_a_late_answer_is_waited_for_as_long_as_computing_would_take(
    start: StartEngine, rate: float, is_patient: bool
) -> None:
    engine = start(kvpool__wait_s=0.002, kvpool__always_load=False)
    clock = later_clock(engine)
    ask(engine, "cold", TOKENS)
    engine.scheduler._scheduler._rates._prefill.forget()
    engine.scheduler._scheduler._rates._least_prefill._rates.clear()
    engine.scheduler._scheduler._rates.add_prefill(1000, 1000 / rate)
    engine.scheduler._scheduler._hits._chunks_to_load = lambda offered, _pace: len(offered)
    withhold_answers(engine)
    request = Request("late", list(TOKENS))
    first = matched(engine, request)
    clock.advance(0.9 * 5 * CHUNK)
    assert matched(engine, request) == ((None, False) if is_patient else (0, False))
    assert first == (None, False) or not is_patient


def test_chunks_that_another_engine_is_saving_are_waited_for(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    ask(engine, "part", TOKENS[: 3 * CHUNK + 1])
    engine.scheduler._scheduler._rates = type(engine.scheduler._scheduler._rates)()  # its prefill is not known
    with being_saved(engine, TOKENS, 3) as save:
        request = Request("waiting", list(TOKENS))
        assert matched(engine, request) == (None, False)
        assert matched(engine, request) == (None, False)
        save.abort()
    wait_until(lambda: matched(engine, request) == (3 * CHUNK, True), "the wait has ended")
    assert counted(engine, "waits_for_another_save") == 1


def test_the_wait_for_a_slow_save_is_bounded_by_the_setting(start: StartEngine) -> None:
    engine = start(kvpool__wait_s=600.0)
    clock = later_clock(engine)
    ask(engine, "part", TOKENS[: 3 * CHUNK + 1])
    engine.forget()
    with being_saved(engine, TOKENS, 3):
        request = Request("waiting", list(TOKENS))
        engine.arrive(request)
        engine.step_until(lambda: counted(engine, "waits_for_another_save") == 1, "it waits")
        clock.advance(601.0)
        engine.step_until(lambda: request not in engine.requests, "it has ended")
        clock.advance(601.0)
        engine.idle()
    assert request.external == 3 * CHUNK


def failing_load(engine: ScriptedEngine, chunk: int) -> Request:
    """A request whose synchronous load has just failed at a chunk; nothing of it has been computed again."""
    ask(engine, "cold", TOKENS)
    corrupt(engine, TOKENS, chunk)
    engine.forget()
    request = Request("failed", list(TOKENS), new_tokens=3)
    engine.requests.append(request)
    engine.step_until(lambda: engine.recomputed == 1, "the load has failed")
    return request


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_blocks_of_a_failed_load_are_not_found_when_its_request_is_gone(start: StartEngine, chunk: int) -> None:
    """A request aborted before its blocks were computed again leaves them in the engine's own prefix cache."""
    engine = start(kvpool__load="sync")
    engine.abort(failing_load(engine, chunk))
    request = Request("next", [*TOKENS, *prompt(9, CHUNK)], new_tokens=3)
    engine.run(request)
    assert request.held == chunk * CHUNK


def test_blocks_of_a_failed_load_are_not_found_while_they_are_computed_again(start: StartEngine) -> None:
    engine = start(kvpool__load="sync")
    failed = failing_load(engine, 1)
    engine.budget = CHUNK // 2
    engine.requests.insert(0, Request("other", [*TOKENS, *prompt(9, CHUNK)], new_tokens=3))
    engine.run(*engine.requests)
    assert failed.generated == 3


def test_a_request_that_shares_blocks_of_a_load_under_way_waits_for_it(start: StartEngine) -> None:
    engine = start(kvpool__load="sync")
    ask(engine, "cold", TOKENS)
    engine.forget()
    first, second = Request("first", list(TOKENS), new_tokens=9), Request("second", [*TOKENS, 7])
    apart = Request("apart", prompt(9, 3 * CHUNK), new_tokens=9)
    admit = engine._ask
    # It is let in only beside the first one's load.
    engine._ask = lambda request: (request is not second or first.num_computed > 0) and admit(request)
    engine.requests += [first, apart, second]
    engine.step_until(lambda: first.num_computed > 0, "the first one runs")
    assert apart.num_computed > 0
    assert second.num_computed == 0
    engine.run(first, second, apart)
    assert counted(engine, "waits_for_a_shared_load") == 1
    assert (second.held, second.external) == (5 * CHUNK, 0)


def test_a_hit_that_computing_beats_is_declined_and_counted(start: StartEngine) -> None:
    engine = start(kvpool__always_load=False)
    ask(engine, "cold", TOKENS)
    rates = engine.scheduler._scheduler._rates
    rates._prefill = FittedTime(1e7, least=1.0, most=1e7)
    for level in rates._tiers:
        rates._tiers[level] = FittedTime(1e6, least=1e6, most=1e12)
    assert ask(engine, "warm", TOKENS).external == 0
    assert counted(engine, "declined_tokens_slower_than_computing_dram") == 5 * CHUNK
    waiting = Request("waiting for blocks", list(TOKENS))
    engine.forget()
    for _ in range(3):
        assert matched(engine, waiting) == (0, False)
    assert counted(engine, "declined_tokens_slower_than_computing_dram") == 5 * CHUNK, "it has no blocks yet"
    engine.run(waiting)
    assert counted(engine, "declined_tokens_slower_than_computing_dram") == 10 * CHUNK
    rates._prefill = FittedTime(1.0, least=1.0, most=1e7)
    rates._least_prefill._rates.clear()
    assert ask(engine, "slow engine", TOKENS).external == 5 * CHUNK


def test_layers_that_nobody_waited_for_count_as_failed(start: StartEngine) -> None:
    engine = start(kvpool__load="sync")
    ask(engine, "cold", TOKENS)
    engine.workers[0].wait_for_layer_load = lambda name: None
    engine._is_right = lambda *_: True  # the bytes may or may not have come in time
    ask(engine, "unwaited", TOKENS)
    assert engine.recomputed == 1
    del engine._is_right
    assert ask(engine, "from then on", TOKENS).external == 5 * CHUNK
    assert engine.recomputed == 1


def test_a_defect_inside_the_guard_is_a_miss_and_is_logged_once(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)

    def broken(*_: object, **_more: object) -> None:
        raise ZeroDivisionError("a defect")

    engine.scheduler._scheduler.pool.lookup = broken
    engine.workers[0]._worker.pool.save = broken
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        for name in ("one", "two", "three"):
            assert ask(engine, name, prompt(9, 4 * CHUNK + 1)).external == 0
    assert sum("lookup failed: ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1
    assert sum("opening a save failed: ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_defect_after_the_promise_still_ends_the_request(start: StartEngine, load: str) -> None:
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)
    half = engine.scheduler._scheduler

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    engine.on_asked = lambda: setattr(half._offers, "promise", broken)
    assert ask(engine, "warm", TOKENS, new_tokens=3).offers[0] == 5 * CHUNK
    assert engine.recomputed == 1


def test_unreadable_block_tables_are_never_used_for_saves(start: StartEngine) -> None:
    engine = start(budget=CHUNK)
    planner = engine.scheduler._scheduler._planner
    plan, calls = planner.plan, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise ZeroDivisionError("a defect")
        return plan(*arguments)

    planner.plan = failing
    ask(engine, "cold", TOKENS)
    assert counted(engine, "saved_chunks") == 1
    assert ask(engine, "warm", TOKENS).external == CHUNK


def test_workers_without_a_pool_are_logged(start: StartEngine) -> None:
    writer, engine = start(), start()
    ask(writer, "cold", TOKENS)
    worker = engine.workers[0]
    odd = {name: torch.zeros((64, 3), dtype=torch.uint8) for name in worker._worker._layers}
    worker.register_kv_caches(odd)
    assert "shape (64, 3)" in worker._worker.report().off
    ask(engine, "first", TOKENS)
    assert ask(engine, "second", TOKENS).external == 0


def test_a_full_pool_declines_and_the_engine_goes_on(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    pool = engine.workers[0]._worker.pool
    big = daemon.connect(kv.Layout(layers=2, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256))
    keys = big.keys(list(range(256 * 16)))
    store(big, keys)
    with big.acquire(big.lookup(keys)) as lease:
        assert lease.chunks
        assert ask(engine, "cold", TOKENS).generated == 1
    assert pool.connected
    big.close()


@pytest.mark.parametrize("kept", [0, 2])
def test_what_was_dropped_before_the_promise_came_is_computed_and_stored_again(
    start: StartEngine, daemon: Daemon, kept: int
) -> None:
    engine = start()
    ask(engine, "first", TOKENS)
    engine.forget()
    withheld = withhold_answers(engine)
    request = Request("second", list(TOKENS))
    engine.arrive(request)
    engine.step()
    assert withheld.count == 1
    pool = engine.workers[0]._worker.pool
    leading = pool.keys_from_hashes(request.block_hashes[: kept * CHUNK // BLOCK], BLOCK, salt=b"")
    with pool.acquire(pool.lookup(leading)) as lease, daemon.admin() as admin:
        assert lease.chunks == kept
        admin.flush(None, None)  # but for what is leased
        withheld.deliver()
    withheld.end()
    engine.run(request)
    engine.idle()
    assert request.external == kept * CHUNK
    assert daemon.stats()["dram.chunks"] == 5
    assert ask(engine, "third", TOKENS).external == 5 * CHUNK


def test_a_request_of_another_thread_that_was_given_up_keeps_no_idle_engine_busy(
    start: StartEngine, daemon: Daemon
) -> None:
    engine = start()
    line = engine.scheduler._scheduler._promise_line
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(DaemonUnreachable, match="no answer to Announce"):
        line.call(m.Announce(b"k" * 32), m.Announced, 0.1)
    daemon.signal(signal.SIGCONT)

    def is_idle() -> bool:
        engine.step()
        return not line.is_busy

    wait_until(is_idle, "its answer is taken by a step")
