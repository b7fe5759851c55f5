"""A vLLM worker that cannot store KV: loads planned for it end as failed, and the scheduler is notified."""

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, arrive_with_a_promise, ask, counted, prompt
from tests.rigs.vllm.specs import specs_by_layer

TOKENS = prompt(1, 5 * CHUNK + 1)


def test_workers_that_are_shown_a_spec_for_each_layer_share_with_others(start: StartEngine) -> None:
    engine = start(worker_specs={0: specs_by_layer()})
    ask(engine, "cold", TOKENS)
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK
    assert ask(start(), "plain", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("absent", [(0,), (1,), (0, 1)])
def test_loads_planned_for_a_worker_without_a_pool_fail_and_no_more_are_planned(
    start: StartEngine, load: str, absent: tuple[int, ...]
) -> None:
    ask(start(ranks=2), "cold", TOKENS)
    odd = specs_by_layer(num_kv_heads=1)
    engine = start(ranks=2, kvpool__load=load, worker_specs=dict.fromkeys(absent, odd))
    engine.forget()
    request = Request("first", list(TOKENS), new_tokens=3)
    arrive_with_a_promise(engine, request)
    engine.run(request)
    assert request.offers[0] == 5 * CHUNK
    assert engine.recomputed >= 1
    assert counted(engine, "short_loads_no-pool") >= len(absent)
    assert "has num_kv_heads 1, expected what layer" in engine.scheduler._scheduler._off
    assert ask(engine, "third", TOKENS).offers == [0]
    assert counted(engine, "saved_chunks") == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_worker_whose_tensors_do_not_fit_fails_its_loads(start: StartEngine, load: str) -> None:
    ask(start(), "cold", TOKENS)
    engine = start(kvpool__load=load)
    odd = {name: torch.zeros((64, 3), dtype=torch.uint8) for name in engine.workers[0]._worker._layers}
    engine.workers[0].register_kv_caches(odd)
    engine.workers[0]._worker.pool, engine.workers[0]._worker._memory = None, None
    request = Request("first", list(TOKENS), new_tokens=3)
    arrive_with_a_promise(engine, request)
    engine.run(request)
    assert request.offers[0] == 5 * CHUNK
    assert engine.recomputed == 1
    assert ask(engine, "second", TOKENS).offers == [0]


def test_a_worker_that_is_refused_while_registering_is_counted_once(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    worker = engine.workers[0]
    worker.get_kv_connector_stats()
    names = list(worker._worker._layers)
    worker.register_kv_caches({name: torch.zeros((64, 3), dtype=torch.uint8) for name in names})
    assert worker.get_kv_connector_stats().data["refusals_odd_blocks"] == 1
    worker.build_connector_worker_meta()
    assert worker.get_kv_connector_stats() is None
    monkeypatch.setattr(type(worker._worker), "register", lambda _half, _tensors: 1 / 0)
    worker.register_kv_caches({})
    assert worker.get_kv_connector_stats().data["refusals_other"] == 1


def test_a_reset_does_not_fail_for_a_rank_without_a_pool_and_nothing_is_saved(
    start: StartEngine,
) -> None:
    engine = start(ranks=2, worker_specs={1: specs_by_layer(num_kv_heads=1)})
    for number in range(3):
        engine.run(Request(f"ends-{number}", prompt(number, 3 * CHUNK + 1)))
        assert engine.blocks.reset_prefix_cache()
    saved = counted(engine, "saved_chunks")
    engine.run(Request("later", prompt(9, 3 * CHUNK + 1)))
    assert counted(engine, "saved_chunks") == saved, "half of a chunk is no chunk"


def test_a_socket_without_a_daemon_is_named_in_the_log(start: StartEngine, caplog: pytest.LogCaptureFixture) -> None:
    path = "/nonexistent/kvpool.sock"
    engine = start(socket=path)
    assert ask(engine, "alone", TOKENS).external == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    named = [line for line in warnings if path in line]
    assert named, warnings
    assert all("nothing is loaded or saved until a daemon serves" in line for line in named)
