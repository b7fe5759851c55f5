"""Resets of vLLM's prefix cache during saves: saves that are reading are waited for, the others never begin."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.clock import MonotonicClock
from kvpool_client.vllm.save_board import RankSaves, SaveBoard
from kvpool_client.vllm.scheduler.forgetting import OwnPrefixes, watch_resets
from kvpool_client.vllm.scheduler.saves.pins import Pins
from tests.rigs.daemon import wait_until
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt
from tests.rigs.vllm.specs import specs_by_layer
from tests.unit.vllm.scheduler.test_saves import Gate, gate

__all__ = ["gate"]

REQUESTS = 5


def saves_under_way(engine: ScriptedEngine, gate: Gate, ranks: int = 1) -> list[Request]:
    """Ended requests whose saves wait at the gate: two of each rank have begun, the others not."""
    requests = [Request(f"cold-{number}", prompt(number, 3 * CHUNK + 1), new_tokens=2) for number in range(REQUESTS)]
    engine.arrive(*requests)
    engine.step_until(lambda: not engine.requests, "they have ended")
    wait_until(lambda: len(gate.waiting) == 2 * ranks, "two of each rank have begun")
    assert engine.blocks.held
    return requests


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_waits_for_saves_that_read_and_drops_the_others(start: StartEngine, gate: Gate, ranks: int) -> None:
    engine = start(ranks=ranks, kvpool__timeout_s=600.0, kvpool__save="prompt")
    requests = saves_under_way(engine, gate, ranks)
    resets: list[bool] = []
    thread = threading.Thread(target=lambda: resets.append(engine.blocks.reset_prefix_cache()))
    thread.start()
    assert not resets, "two saves of each rank read"
    gate.set()
    thread.join(60.0)
    assert resets == [True], "without a step between"
    assert not engine.blocks.held
    engine.idle()
    ask(engine, "after", prompt(50, 3 * CHUNK + 1))
    kept = counted(engine, "saved_chunks")
    assert counted(engine, "dropped_saves") > 0
    fresh = start(ranks=ranks)
    loaded = sum(ask(fresh, f"warm-{number}", request.tokens).external for number, request in enumerate(requests))
    assert 0 < loaded <= (kept / ranks - 3) * CHUNK


def test_a_reset_beside_saves_does_not_fail_for_a_rank_without_a_pool(start: StartEngine, gate: Gate) -> None:
    odd = specs_by_layer(num_kv_heads=1)
    engine = start(ranks=2, worker_specs={1: odd}, kvpool__timeout_s=600.0, kvpool__save="prompt")
    saves_under_way(engine, gate)
    resets: list[bool] = []
    thread = threading.Thread(target=lambda: resets.append(engine.blocks.reset_prefix_cache()))
    thread.start()
    gate.set()
    thread.join(60.0)
    assert resets == [True]
    assert not engine.blocks.held


def test_the_wait_of_a_reset_for_a_reading_save_is_bounded_by_the_setting(start: StartEngine, gate: Gate) -> None:
    engine = start(kvpool__timeout_s=0.2, kvpool__save="prompt")
    saves_under_way(engine, gate)
    assert not engine.blocks.reset_prefix_cache()
    assert engine.blocks.held
    gate.set()
    wait_until(engine.blocks.reset_prefix_cache, "nobody reads any more")
    assert not engine.blocks.held


def test_a_reset_beside_requests_drops_no_save(start: StartEngine, gate: Gate) -> None:
    engine = start(blocks=256, kvpool__timeout_s=600.0, kvpool__save="prompt")
    requests = saves_under_way(engine, gate)
    running = Request("running", prompt(60, 2 * CHUNK + 1), new_tokens=50)
    engine.arrive(running)
    engine.step_until(lambda: running.generated > 0, "it computes")
    assert not engine.blocks.reset_prefix_cache()
    gate.set()
    engine.abort(running)
    engine.idle()
    assert counted(engine, "dropped_saves") == 0
    assert counted(engine, "saved_chunks") == 3 * len(requests) + 2


def test_a_block_pool_without_a_reset_function_is_not_changed() -> None:
    assert not watch_resets(SimpleNamespace(), lambda: None, lambda _: None)
    asked: list[str] = []

    def reset_prefix_cache(*arguments: object, **named: object) -> bool:
        asked.append(f"reset{arguments}{named}")
        return not arguments

    pool = SimpleNamespace(reset_prefix_cache=reset_prefix_cache)
    assert watch_resets(pool, lambda: asked.append("before"), lambda is_done: asked.append(f"after: {is_done}"))
    assert pool.reset_prefix_cache()
    assert not pool.reset_prefix_cache(1, of="all")
    assert asked == ["before", "reset(){}", "after: True", "before", "reset(1,){'of': 'all'}", "after: False"]


def test_own_prefixes_are_outdated_from_new_weights_until_they_are_dropped() -> None:
    own = OwnPrefixes()
    own.renew()
    assert own.are_old, "nothing was forgotten before"
    own.note_reset(7)
    assert not own.are_old
    own.renew()
    assert not own.are_old, "forgotten, and nothing computed since"
    own.note_used()
    own.renew()
    assert own.are_old
    for step, are_old in ((6, False), (7, False), (8, True)):
        own.renew(step)
        assert own.are_old is are_old, "what was computed since the reset is of the weights after that step"


def test_a_reset_waits_for_both_requests_of_a_save() -> None:
    limits: list[float] = []

    def drain(limit_s: float) -> dict[int, int]:
        limits.append(limit_s)
        return {1: 1}

    freed: list[object] = []
    pool: Any = SimpleNamespace(blocks=range(8), touch=lambda _: None, free_blocks=freed.append)
    pins = Pins(1, MonotonicClock(), 2.0)
    pins.hold_in(pool, drain)
    assert pins.hold_blocks([3]) == 1
    pins.free_for_reset()
    assert limits[0] > 2 * 2.0, "a save asks the daemon before its copy and after it"
    assert freed == [[3]]
    assert not pins


def test_a_rank_that_has_not_attached_has_no_state(tmp_path: Path) -> None:
    board, clock = SaveBoard(2), MonotonicClock()
    ranks = [RankSaves(), RankSaves()]
    ranks[0].attach(board.path, 0)
    assert not board.take_back(3, 0.0, clock)
    ranks[1].attach(board.path, 1)
    with ranks[1].reading(3) as may_read:
        assert may_read, "nothing was taken back while a rank was unknown"
        assert not board.take_back(3, 0.0, clock)
    assert board.take_back(3, 0.0, clock)
    for pin, expected in ((3, False), (4, True)):
        with ranks[0].reading(pin) as may_read:
            assert may_read is expected
    with pytest.raises(OSError, match="No such file"):
        RankSaves().attach(str(tmp_path / "none"), 0)
    for rank in ranks:
        rank.close()
    board.close()
