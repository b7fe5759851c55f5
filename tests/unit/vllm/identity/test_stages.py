"""Pipeline parallelism behind the vLLM connector: stages of unequal length, each with its layers, and what is found of them.

Every byte that the scripted engine reads is checked on the stage that has it, so each test is one of right bytes too.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.vllm.identity.geometry import geometry_of
from kvpool_client.vllm.worker.sync_loads import broken_recovery
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm.config import caches_of, config_of
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, corrupt, counted, lose_next_lease, prompt
from tests.rigs.vllm.specs import specs_by_layer

TOKENS = prompt(1, 5 * CHUNK + 1)
STAGES = (2, 1)


@pytest.mark.parametrize(
    ("stages", "ranks", "load"), [((2, 1), 2, "async"), ((1, 2), 1, "sync"), ((1, 1, 1), 1, "async")]
)
def test_stages_store_their_own_layers_and_another_engine_loads_them(
    start: StartEngine, daemon: Daemon, stages: tuple[int, ...], ranks: int, load: str
) -> None:
    first = start(stages=stages, ranks=ranks, kvpool__load=load)
    ask(first, "cold", TOKENS)
    assert counted(first, "saved_chunks") == 5 * ranks * len(stages)
    assert daemon.stats()["dram.chunks"] == 5 * ranks * len(stages)
    assert ask(first, "again", TOKENS).external == 5 * CHUNK
    other = start(stages=stages, ranks=ranks, kvpool__load=load)
    assert ask(other, "other", TOKENS, new_tokens=3).external == 5 * CHUNK
    assert counted(other, "loaded_chunks") == 5 * ranks * len(stages)
    assert other.recomputed == 0
    assert daemon.stats()["tickets"] == 0
    assert daemon.problems() == []


def test_kv_replicated_over_ranks_of_a_stage_is_stored_once_for_each_stage(start: StartEngine, daemon: Daemon) -> None:
    engine = start(stages=STAGES, ranks=2, replicas=2)
    ask(engine, "cold", TOKENS)
    assert daemon.stats()["dram.chunks"] == 5 * len(STAGES)
    assert ask(start(stages=STAGES, ranks=2, replicas=2), "warm", TOKENS).external == 5 * CHUNK


def test_other_divisions_of_the_same_model_share_nothing(start: StartEngine) -> None:
    ask(start(stages=(2, 1)), "cold", TOKENS)
    for stages, ranks in (((1, 2), 1), ((1, 1, 1), 1), ((2, 1), 2), ((3,), 2), ((3,), 1)):
        assert ask(start(stages=stages, ranks=ranks), "apart", TOKENS).external == 0
    assert ask(start(stages=(2, 1)), "same", TOKENS).external == 5 * CHUNK


def test_stages_are_found_on_disk_after_a_restart_of_the_daemon(
    start: StartEngine, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    ask(start(socket=daemon.socket, stages=STAGES), "cold", TOKENS)
    with daemon.admin() as admin:
        assert admin.demote_all(60.0)["left"] == 0
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.stats().get("ssd.chunks", 0) >= 5 * len(STAGES), "all chunks are found on disk")
    other = start(socket=daemon.socket, stages=STAGES)
    assert ask(other, "warm", TOKENS).external == 5 * CHUNK
    assert counted(other, "hit_tokens_ssd") == 5 * CHUNK
    assert daemon.problems() == []


@pytest.mark.parametrize("rank", [0, 3])
def test_a_chunk_that_one_rank_of_one_stage_does_not_have_is_no_hit(start: StartEngine, rank: int) -> None:
    """The others have all five; the missing one is stored again when it is computed."""
    engine = start(stages=STAGES, ranks=2)
    memory, saved = engine.workers[rank]._worker._memory, []
    save = memory.save

    def first_two(keys: kv.KeyChain, chunks: Any, blocks: Any, retention: Any) -> kv.Save:
        saved.append(keys)
        if len(saved) == 1:
            chunks, blocks = [chunks[0][:2]], [blocks[0][: 2 * 2]]
        made: kv.Save = save(keys, chunks, blocks, retention)
        return made

    memory.save = first_two
    ask(engine, "cold", TOKENS)
    assert saved
    other = start(stages=STAGES, ranks=2)
    assert ask(other, "part", TOKENS).external == 2 * CHUNK
    assert counted(other, "saved_chunks") == 3
    assert ask(other, "whole", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_whose_save_fails_leaves_no_hit(start: StartEngine, daemon: Daemon, rank: int) -> None:
    engine = start(stages=STAGES)

    def broken(*_: object, **_more: object) -> None:
        raise ZeroDivisionError("a defect")

    engine.workers[rank]._worker.pool.save = broken
    ask(engine, "cold", TOKENS)
    assert daemon.stats()["dram.chunks"] == 5
    assert not engine.blocks.held
    assert ask(start(stages=STAGES), "warm", TOKENS).external == 0
    assert ask(start(stages=STAGES), "again", TOKENS).external == 5 * CHUNK


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_load_that_fails_at_one_stage_is_reported_and_computed(
    start: StartEngine, rank: int, is_corrupt: bool
) -> None:
    engine = start(stages=STAGES)
    ask(engine, "cold", TOKENS)
    if is_corrupt:
        corrupt(engine, TOKENS, 2, rank, layer=-1)
    else:
        lose_next_lease(engine, rank)
    longer = TOKENS + prompt(2, 3 * CHUNK)
    request = ask(engine, "failing", longer, new_tokens=2 * CHUNK + 2)
    assert request.offers[0] == 5 * CHUNK
    assert engine.recomputed == 1
    assert counted(engine, f"failed_loads_{'checksum' if is_corrupt else 'gone'}") == 1
    assert ask(start(stages=STAGES), "fresh", longer + prompt(3, 1)).external == 8 * CHUNK


def test_a_daemon_killed_between_lookup_and_load_is_a_miss_of_all_stages(start: StartEngine, daemon: Daemon) -> None:
    engine = start(stages=STAGES)
    ask(engine, "cold", TOKENS)
    engine.on_allocated = daemon.kill
    assert ask(engine, "warm", TOKENS, new_tokens=3).offers[0] == 5 * CHUNK
    assert engine.recomputed == 1


def test_an_aborted_load_leaves_nothing_leased_on_any_stage(start: StartEngine, daemon: Daemon) -> None:
    engine = start(stages=STAGES)
    ask(engine, "cold", TOKENS)
    engine.forget()
    request = Request("aborted", list(TOKENS))
    engine.arrive(request)
    engine.step_until(lambda: request.state == "loading", "it loads")
    engine.abort(request)
    engine.step_until(lambda: not engine.requests, "it is gone")
    wait_until(lambda: daemon.stats()["leases"] == 0 and daemon.stats()["tickets"] == 0, "nothing is leased")
    assert ask(engine, "next", TOKENS).external == 5 * CHUNK


def test_blocks_are_held_until_every_stage_has_saved_them(start: StartEngine) -> None:
    engine = start(stages=STAGES)
    late = engine.workers[1]._worker
    report, reports = late.report, []

    def held_back() -> Any:
        reports.append(report())
        return type(reports[-1])(reports[-1].step)

    late.report = held_back
    request = Request("cold", list(TOKENS))
    engine.arrive(request)
    engine.step_until(lambda: any(sent.ended_saves for sent in reports), "the second stage has saved")
    assert engine.blocks.held
    late.report = lambda: reports.pop(0) if reports else report()
    engine.idle()
    assert not engine.blocks.held


def test_a_single_stage_has_unchanged_names_and_keys() -> None:
    layout = geometry_of(config_of("/x"), caches_of(), 2 * BLOCK, lambda _spec, _heads: "form").layout
    assert layout.stages == ()
    assert len(layout.to_wire()) == 10
    spread = geometry_of(
        config_of("/x", stages=STAGES), caches_of(layers=range(2)), 2 * BLOCK, lambda _spec, _heads: "form"
    )
    assert (spread.layout.layers, spread.layout.world, spread.layout.stages) == (2, 2, STAGES)
    assert [spread.shard(rank).layers for rank in range(4)] == [2, 1, 2, 1], "data-parallel ranks count on"


def test_loads_run_between_steps_where_steps_overlap() -> None:
    assert "pipeline" in broken_recovery(config_of("/x", stages=STAGES), may_cut_hits=True)
    assert not broken_recovery(config_of("/x"), may_cut_hits=True)
    assert "different tokens" in broken_recovery(config_of("/x"), may_cut_hits=False)


def without_division(config: Any) -> None:
    del config.model_config.get_layers_start_end_indices


def with_bad_division(config: Any) -> None:
    def divide(_parallel: Any) -> tuple[int, int]:
        raise ValueError("sum(partitions)=4 does not match num_hidden_layers=3.")

    config.model_config.get_layers_start_end_indices = divide


@pytest.mark.parametrize(
    ("change", "layers", "spec", "message"),
    [
        (without_division, range(2), None, "does not give the layers of each of 2 stages"),
        (with_bad_division, range(2), None, "stages: sum.*does not match num_hidden_layers"),
        (
            lambda _: None,
            range(3),
            None,
            "stage 0 of 2 has layer 'model.layers.2.self_attn.attn', expected layers 0 to 1",
        ),
        (lambda _: None, range(1), None, "stage 0 of 2 has 1 layers of KV, expected layers 0 to 1"),
        (lambda _: None, range(2), specs_by_layer(), "layers have blocks of several kinds"),
    ],
)
def test_stages_that_cannot_be_distinguished_are_refused_with_a_remedy(
    change: Any, layers: range, spec: Any, message: str
) -> None:
    config = config_of("/x", stages=STAGES)
    change(config)
    with pytest.raises(kv.LayoutMismatch, match=f"{message}.*without --pipeline-parallel-size"):
        geometry_of(config, caches_of(spec=spec, layers=layers), 2 * BLOCK, lambda _spec, _heads: "form")


def test_a_stage_that_cannot_be_served_is_logged_and_no_hit_fails_for_it_twice(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    ask(start(stages=STAGES), "cold", TOKENS)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        engine = start(stages=STAGES, worker_specs={1: specs_by_layer()})
        ask(engine, "first", TOKENS)
        for name in ("second", "third"):
            assert ask(engine, name, TOKENS).offers == [0]
    assert engine.recomputed <= 1
    logged = [record.getMessage() for record in caplog.records]
    assert any("the workers have no pool" in line and "--pipeline-parallel-size" in line for line in logged), logged
    assert not engine.blocks.held
