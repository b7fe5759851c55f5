"""The vLLM connector where an engine is a part of something: producer or consumer, filled by another, split, or spread."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.vllm.ranks.placement import check_placement, fault_of_node, node_name
from kvpool_client.vllm.worker.micro_batches import MicroBatches
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, being_saved, counted, later_clock, matched, prompt
from tests.rigs.vllm.specs import LAYERS, NAMES

TOKENS = prompt(1, 5 * CHUNK + 1)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_producer_saves_and_never_loads(start: StartEngine, load: str) -> None:
    engine = start(kv_role="kv_producer", kvpool__load=load)
    ask(engine, "cold", TOKENS)
    assert counted(engine, "saved_chunks") == 5
    assert ask(engine, "warm", TOKENS).offers == [0]
    assert counted(engine, "lookups") == 0
    assert counted(engine, "announced_chunks") == 0
    assert ask(start(), "other", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_consumer_loads_and_never_saves(start: StartEngine, load: str) -> None:
    ask(start(), "cold", TOKENS)
    engine = start(kv_role="kv_consumer", kvpool__load=load)
    longer = TOKENS + prompt(2, 3 * CHUNK)
    assert ask(engine, "warm", longer, new_tokens=CHUNK + 2).external == 5 * CHUNK
    assert counted(engine, "saved_chunks") == 0
    assert ask(engine, "again", longer).external == 5 * CHUNK
    assert not engine.blocks.held
    assert not engine.scheduler.has_pending_push_work()


def test_a_prompt_announced_as_saved_elsewhere_is_waited_for_before_any_of_it_is_stored(
    start: StartEngine,
) -> None:
    engine, other = start(kv_role="kv_consumer", kvpool__wait_s=60.0), start(kv_role="kv_producer")
    request = Request("waits", list(TOKENS), kv_transfer_params={"load": "wait"})
    assert matched(engine, request) == (None, False)
    ask(other, "part", TOKENS[: 3 * CHUNK + 1])
    assert matched(engine, request) == (None, False), "the rest is to come"
    ask(other, "all", TOKENS)
    wait_until(lambda: matched(engine, request) == (5 * CHUNK, True), "the wait has ended")
    assert counted(engine, "waits_for_another_save") == 1


def test_the_wait_for_a_prompt_that_nobody_saves_is_bounded_by_the_setting(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__wait_s=600.0)
    clock = later_clock(engine)
    ask(engine, "part", TOKENS[: 3 * CHUNK + 1])
    waits = {"load": "wait"}
    for number, (tokens, expected) in enumerate([(TOKENS[: 4 * CHUNK + 1], 3 * CHUNK), (prompt(7, 3 * CHUNK), 0)]):
        engine.forget()
        request = Request(f"waits-{number}", list(tokens), kv_transfer_params=waits)
        engine.arrive(request)
        engine.step()
        assert counted(engine, "waits_for_another_save") == number + 1
        assert request.offers == []
        clock.advance(601.0)
        engine.run(request)
        assert request.external == expected
    assert ask(engine, "short", prompt(8, CHUNK // 2), kv_transfer_params=waits).external == 0
    engine.forget()
    assert ask(engine, "all", TOKENS[: 4 * CHUNK + 1], kv_transfer_params=waits).external == 4 * CHUNK
    assert counted(engine, "waits_for_another_save") == 2, "nothing is missing of these"
    daemon.kill()
    wait_until(lambda: not engine.scheduler._scheduler.pool.connected, "the daemon is gone")
    assert ask(engine, "alone", prompt(9, 3 * CHUNK), kv_transfer_params=waits).external == 0
    assert counted(engine, "waits_for_another_save") == 2, "nobody can save anything"


@pytest.mark.parametrize("always_load", [True, False])
def test_an_engine_that_takes_every_hit_waits_for_saves_that_computing_would_outrun(
    start: StartEngine, *, always_load: bool
) -> None:
    engine = start(kvpool__wait_s=60.0, kvpool__always_load=always_load)
    half = engine.scheduler._scheduler
    half._rates.add_prefill(10_000_000, 0.001)
    request = Request("waiting", list(TOKENS))
    with being_saved(engine, TOKENS):
        matched(engine, request)
        if always_load:
            assert matched(engine, request) == (None, False)
        else:
            wait_until(lambda: matched(engine, request) == (0, False), "it is computed")


def test_a_request_that_another_connector_fills_is_not_served(start: StartEngine, daemon: Daemon) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    engine.forget()
    before = counted(engine, "lookups")
    remote = {"do_remote_prefill": True, "remote_host": "elsewhere"}
    request = Request("remote", list(TOKENS), kv_transfer_params=remote)
    engine.scheduler.on_new_request(request)
    assert matched(engine, request) == (0, False)
    assert counted(engine, "lookups") == before
    assert engine.scheduler._scheduler._waiting == {}
    assert daemon.stats()["tickets"] == 0
    request.kv_transfer_params = {**remote, "do_remote_prefill": False}
    engine.run(request)
    assert request.external == 5 * CHUNK


@pytest.mark.parametrize("params", [None, "odd", {"do_remote_prefill": False}, {"do_remote_decode": True}])
def test_other_requests_are_served(start: StartEngine, params: Any) -> None:
    engine = start()
    ask(engine, "cold", TOKENS)
    assert ask(engine, "warm", TOKENS, kv_transfer_params=params).external == 5 * CHUNK


def test_a_layer_is_announced_when_its_last_micro_batch_has_written_it(start: StartEngine) -> None:
    engine = start(holds_blocks=False)
    worker = engine.workers[0]
    worker._micro_batches = MicroBatches(2, lambda: True)
    save_layer = worker._worker.save_layer
    announced: list[str] = []

    def noted(name: str) -> None:
        announced.append(name)
        save_layer(name)

    worker._worker.save_layer = noted
    halves = worker.save_kv_layer

    def first_half_is_early(name: str, layer: Any, metadata: Any) -> None:
        before = len(announced)
        written = layer.clone()
        layer.fill_(99)
        halves(name, layer, metadata)
        assert len(announced) == before, "the second micro-batch has not written it"
        layer.copy_(written)
        halves(name, layer, metadata)
        assert announced[before:] == [name]

    worker.save_kv_layer = first_half_is_early
    ask(engine, "cold", TOKENS)
    assert announced
    assert announced == NAMES * (len(announced) // LAYERS)
    assert ask(start(), "warm", TOKENS).external == 5 * CHUNK


def test_an_unsplit_step_and_a_split_one_with_less_information_are_saved(start: StartEngine) -> None:
    engine = start(holds_blocks=False)
    engine.workers[0]._micro_batches = MicroBatches(2, lambda: False)
    ask(engine, "whole", TOKENS)
    assert counted(engine, "saved_chunks") == 5
    engine.workers[0]._micro_batches = MicroBatches(2, lambda: True)
    ask(engine, "less", prompt(7, 5 * CHUNK + 1))
    assert counted(engine, "saved_chunks") == 10, "announced when the forward pass has ended"


def test_micro_batches_are_counted_anew_in_each_step() -> None:
    batches = MicroBatches.of(SimpleNamespace(use_ubatching=True, num_ubatches=3))
    assert batches.has_written(NAMES[0]), "nothing runs in micro-batches here"
    split = MicroBatches(3, lambda: True)
    for _ in range(2):
        split.begin_step()
        assert [split.has_written(NAMES[0]) for _ in range(3)] == [False, False, True]
    assert MicroBatches.of(SimpleNamespace()).has_written(NAMES[0])


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "tokens over ranks 0 to 3.*--decode-context"),
        ({"tensor_parallel_size": 4, "prefill_context_parallel_size": 2}, "ranks 0 to 7.*--prefill-context-parallel"),
        (
            {"tensor_parallel_size": 16, "nnodes": 2},
            "ranks 8 to 15 cannot reach.*ranks 0 to 7.*--tensor-parallel-size 8",
        ),
        ({"tensor_parallel_size": 16, "nnodes": 4, "nnodes_within_dp": 2}, "2 nodes: ranks 8 to 15"),
        (
            {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nnodes": 2},
            "2 pipeline stages of 8 ranks run on 2 nodes: ranks 8 to 15 cannot reach.*--pipeline-parallel-size of 8 ranks",
        ),
    ],
)
def test_ranks_that_cannot_be_served_are_named_at_the_start(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(kv.LayoutMismatch, match=message):
        check_placement(SimpleNamespace(**parallel))


def test_separate_data_parallel_nodes_are_served() -> None:
    check_placement(SimpleNamespace(tensor_parallel_size=8, nnodes=2, nnodes_within_dp=1))
    check_placement(SimpleNamespace(tensor_parallel_size=1))
    check_placement(SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=2, nnodes=2, nnodes_within_dp=1))
    assert fault_of_node(0, here=node_name(), scheduler=node_name()) == ""


@pytest.mark.parametrize("load", ["async", "sync"])
def test_ranks_on_another_node_are_logged_once_and_no_hit_fails_for_them(
    start: StartEngine, caplog: pytest.LogCaptureFixture, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool_client.vllm.scheduler import scheduler

    ask(start(ranks=2), "cold", TOKENS)
    monkeypatch.setattr(scheduler, "node_name", lambda: "away/0123")
    engine = start(ranks=2, kvpool__load=load)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        ask(engine, "first", TOKENS)
        for name in ("second", "third"):
            assert ask(engine, name, TOKENS).offers == [0]
    assert engine.recomputed <= 1
    logged = [record.getMessage() for record in caplog.records if "away/0123" in record.getMessage()]
    assert any("rank 0 runs" in line and "rank 1 runs" in line for line in logged), logged
    assert counted(engine, "saved_chunks") == 0
