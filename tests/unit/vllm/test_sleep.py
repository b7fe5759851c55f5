"""Sleep: before vLLM takes the memory of its KV away nothing of the pool's is left on it; afterwards it is registered again.

The scripted engine's memory is checked: nobody has written to it while it was gone. What was saved meanwhile would be wrong
bytes for the next reader.
"""

import signal
import threading
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.held_weights import HeldWeights, held_weights
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, arrive_with_a_promise, ask, counted, load_unreported, prompt
from tests.unit.vllm.scheduler.test_saves import Gate, gate
from tests.unit.vllm.test_reset import saves_under_way

__all__ = ["gate", "held_weights"]

TOKENS = prompt(1, 5 * CHUNK + 1)
SHAPES: list[dict[str, Any]] = [
    {"kvpool__load": "async"},
    {"kvpool__load": "sync"},
    {"ranks": 2},
    {"windows": (0, 12)},
    {"windows": (0, 12), "stages": (1, 1), "kvpool__head_groups": 2},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_an_engine_that_has_slept_loads_nothing_of_before_and_serves_itself_anew(
    start: StartEngine, daemon: Daemon, options: dict[str, Any]
) -> None:
    engine = start(**options)
    ask(engine, "cold", TOKENS)
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK
    connections = daemon.stats()["connections"]
    engine.sleep()
    assert daemon.stats()["connections"] == connections - len(engine.workers)
    engine.wake_up()
    assert ask(engine, "after", TOKENS).external == 0, "the weights may have been changed"
    assert ask(engine, "again", TOKENS).external == 5 * CHUNK
    assert ask(start(**options), "another engine", TOKENS).external == 5 * CHUNK
    assert daemon.stats()["connections"] == 2 * connections - 1, "the test's own counts once"


def test_each_half_of_the_sleep_may_come_twice_or_alone(start: StartEngine) -> None:
    engine = start(ranks=2)
    ask(engine, "cold", TOKENS)
    memories = [worker._worker._memory for worker in engine.workers]
    for worker in engine.workers:
        worker.restore_kv_caches()
    assert [worker._worker._memory for worker in engine.workers] == memories, "it has not slept"
    engine.take_memory()
    engine.take_memory()
    engine.wake_up()
    memories = [worker._worker._memory for worker in engine.workers]
    for worker in engine.workers:
        worker.restore_kv_caches()
    assert [worker._worker._memory for worker in engine.workers] == memories
    engine.forget()
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


def test_nothing_is_registered_while_it_sleeps(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    half = engine.workers[0]._worker
    memory, pool = half._memory, half.pool
    engine.take_memory()
    assert half._memory is None
    assert half._saver._memory is None
    assert half.pool is None
    assert pool.stats()["connected"] == 0
    assert memory.caches, "the test had something to look at"
    engine.wake_up()
    engine.forget()
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_goes_only_when_saves_that_read_it_have_ended(start: StartEngine, gate: Gate, ranks: int) -> None:
    engine = start(ranks=ranks, kvpool__timeout_s=600.0, kvpool__save="prompt")
    requests = saves_under_way(engine, gate, ranks)
    thread = threading.Thread(target=engine.take_memory)
    thread.start()
    assert not gate.is_set()
    assert thread.is_alive(), "two saves of each rank wait"
    gate.set()
    thread.join(60.0)
    assert not thread.is_alive()
    engine.wake_up()
    engine.idle()
    assert not engine.blocks.held, "each was reported as ended"
    fresh = start(ranks=ranks)
    for number, request in enumerate(requests):
        assert ask(fresh, f"warm-{number}", request.tokens).external == 3 * CHUNK, "they had time to end"


def test_saves_that_do_not_end_in_their_time_are_given_up(start: StartEngine, gate: Gate) -> None:
    engine = start(kvpool__timeout_s=0.2, kvpool__save="prompt")
    requests = saves_under_way(engine, gate)
    thread = threading.Thread(target=engine.take_memory)
    thread.start()
    saver = engine.workers[0]._worker._saver
    wait_until(lambda: all(task.is_late for task, _ in saver._running), "their time is over")
    assert thread.is_alive(), "two of them have begun"
    gate.set()
    thread.join(60.0)
    engine.wake_up()
    engine.idle()
    assert not engine.blocks.held
    assert counted(engine, "dropped_saves") == len(requests) - 2
    assert counted(engine, "saved_chunks") <= 2 * 3


def test_a_load_that_hangs_ends_before_the_memory_goes_and_its_request_is_computed(
    start: StartEngine, daemon: Daemon
) -> None:
    engine = start(kvpool__timeout_s=0.3)
    ask(engine, "cold", TOKENS)
    engine.forget()
    requests = [Request(f"loading-{number}", list(TOKENS), new_tokens=3) for number in range(8)]

    def stop() -> None:
        daemon.signal(signal.SIGSTOP)

    for request in requests:
        arrive_with_a_promise(engine, request)
    engine.on_allocated = stop
    engine.step()
    assert all(request.state == "loading" for request in requests)
    engine.take_memory()
    assert all(future.done() for _, future in engine.workers[0]._worker._running)
    daemon.signal(signal.SIGCONT)
    engine.on_allocated = lambda: None
    engine.wake_up()
    engine.run(*requests)
    assert engine.recomputed >= len(requests)
    assert counted(engine, "hit_tokens") == 0
    wait_connected(engine.workers[0]._worker.pool)
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


def test_a_load_that_copies_is_cancelled_and_its_end_is_waited_for(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(kvpool__timeout_s=600.0)
    ask(engine, "cold", TOKENS)
    engine.forget()
    half = engine.workers[0]._worker
    has_begun, was_cancelled, may_end = threading.Event(), threading.Event(), threading.Event()
    begin = half._memory.load

    def begin_slowly(lease: Any, order: Any) -> Any:
        load = begin(lease, order)
        wait, cancel = load.wait, load.cancel

        def wait_long(*arguments: Any) -> Any:
            has_begun.set()
            assert may_end.wait(60.0)
            return wait(*arguments)

        def cancel_it() -> None:
            cancel()
            was_cancelled.set()

        load.wait, load.cancel = wait_long, cancel_it
        return load

    monkeypatch.setattr(half._memory, "load", begin_slowly)
    request = Request("loading", list(TOKENS), new_tokens=2)
    arrive_with_a_promise(engine, request)
    engine.step()
    assert has_begun.wait(60.0)
    thread = threading.Thread(target=engine.take_memory)
    thread.start()
    assert was_cancelled.wait(60.0)
    assert half.pool is not None, "its bytes may still come"
    may_end.set()
    thread.join(60.0)
    assert half.pool is None
    engine.wake_up()
    engine.run(request)
    assert request.generated == 2


def test_what_a_load_has_brought_since_the_last_step_goes_with_the_memory(start: StartEngine) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("loaded", list(TOKENS), new_tokens=2)
    load_unreported(engine, request)
    engine.take_memory()
    engine.wake_up()
    engine.run(request)
    assert engine.recomputed == 1
    assert counted(engine, "hit_tokens") == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_steps_of_a_sleeping_engine_load_and_save_nothing(start: StartEngine, daemon: Daemon, load: str) -> None:
    """vLLM makes none; an engine that did gets its answers."""
    engine = start(kvpool__load=load)
    ask(engine, "cold", TOKENS)
    engine.forget()
    for worker in engine.workers:
        worker.unregister_kv_caches()
    saved = daemon.stats()["saved_chunks"]
    longer = TOKENS + prompt(2, 2 * CHUNK)
    assert ask(engine, "asleep", longer, new_tokens=2).generated == 2
    assert counted(engine, "short_loads_gone") == 1
    assert daemon.stats()["saved_chunks"] == saved
    for worker in engine.workers:
        worker.restore_kv_caches()
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "started anew"])
def test_an_engine_whose_daemon_died_while_it_slept_wakes_up(
    start: StartEngine, daemon: Daemon, is_killed: bool
) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.sleep()
    daemon.kill()
    if not is_killed:
        daemon.start()
    engine.wake_up()
    assert ask(engine, "without", TOKENS, new_tokens=2).external == 0
    if is_killed:
        daemon.start()
    for half in (engine.scheduler._scheduler, engine.workers[0]._worker):
        wait_connected(half.pool)
    wait_until(lambda: engine.scheduler._scheduler._promise_line.is_connected, "promises can be asked for")
    ask(engine, "stored", TOKENS)
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


def test_a_daemon_that_hangs_keeps_neither_sleep_nor_waking_from_ending(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__timeout_s=0.3, ranks=2)
    ask(engine, "cold", TOKENS)
    daemon.signal(signal.SIGSTOP)
    engine.sleep()
    engine.wake_up()
    assert ask_without_a_pool(engine).external == 0
    daemon.signal(signal.SIGCONT)
    for worker in engine.workers:
        wait_connected(worker._worker.pool)


def ask_without_a_pool(engine: ScriptedEngine) -> Request:
    """Its saves end without success, and no daemon answers."""
    request = Request("without", list(TOKENS))
    engine.arrive(request)
    engine.step_until(lambda: request not in engine.requests, "it has ended")
    return request


def test_a_worker_without_a_pool_sleeps_too(start: StartEngine, daemon: Daemon) -> None:
    engine = start(head_dim=7)
    del daemon
    engine.sleep()
    engine.wake_up()


def test_weights_that_get_their_name_while_the_engine_sleeps_register_nothing(
    start: StartEngine, held_weights: HeldWeights
) -> None:
    engine = start(path=held_weights.path)
    engine.sleep()
    held_weights.let_begin(engine)
    worker = engine.workers[0]
    assert worker._late is None, "it has begun"
    assert worker._worker._memory is None
    engine.wake_up()
    assert worker._worker._memory is not None
    assert ask(engine, "cold", TOKENS).external == 0
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK
