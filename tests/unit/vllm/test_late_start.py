"""Connectors of an engine whose weights are read in the background: the engine runs without the pool until they have a name."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.held_weights import HeldWeights, held_weights
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, counted, prompt
from tests.unit.vllm.test_sizes import joint

__all__ = ["held_weights"]

TOKENS = prompt(1, 4 * CHUNK + 1)


def run(engine: Any, name: str, lora: object = None) -> int:
    """One request with nothing in the engine's own cache; the tokens that came from the pool."""
    engine.forget()
    request = Request(name, list(TOKENS), lora_request=lora)
    engine.run(request)
    return request.external


@pytest.mark.parametrize("ranks", [1, 2])
def test_until_the_weights_have_a_name_nothing_is_loaded_or_saved_and_then_all_is(
    start: StartEngine, held_weights: HeldWeights, daemon: Daemon, ranks: int
) -> None:
    engine = start(ranks=ranks, path=held_weights.path)
    before = daemon.stats()["saved_chunks"]
    assert [run(engine, f"early-{number}") for number in range(2)] == [0, 0]
    assert daemon.stats()["saved_chunks"] == before
    held_weights.let_begin(engine)
    assert [run(engine, "cold"), run(engine, "warm")] == [0, 4 * CHUNK]
    assert counted(engine, "saved_chunks") == 4 * ranks
    other = start(ranks=ranks, path=held_weights.path)
    wait_until(lambda: other.scheduler._late is None or other.scheduler._late.is_ready, "the weights are read")
    assert run(other, "other") in (0, 4 * CHUNK), "it begins in the middle of its first steps"
    assert run(other, "again") == 4 * CHUNK


def test_a_worker_in_the_schedulers_process_ends_saves_before_it_has_a_pool(
    start: StartEngine, held_weights: HeldWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's half binds vLLM's blocks before that: with nobody to end saves each step would wait for its own."""
    from kvpool_client.vllm.identity import engine_process

    engine = start(path=held_weights.path)
    group = SimpleNamespace(has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: engine.workers[0])
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", group)
    assert engine.workers[0]._late is not None
    worker: Any = engine_process.worker_here()
    assert worker is engine.workers[0]
    assert worker.drain_saves(60.0) == {}
    held_weights.let_begin(engine)
    assert engine_process.worker_here() is worker


def test_a_request_that_began_before_the_name_was_known_ends_without_the_pool(
    start: StartEngine, held_weights: HeldWeights
) -> None:
    engine = start(path=held_weights.path, budget=CHUNK)
    request = Request("early", list(TOKENS), new_tokens=3 * CHUNK)
    engine.arrive(request)
    engine.step()
    held_weights.let_begin(engine)
    engine.run(request)
    assert run(engine, "cold") <= 4 * CHUNK
    assert run(engine, "warm") == 4 * CHUNK


def test_weights_that_were_read_before_are_known_at_the_start(
    start: StartEngine, held_weights: HeldWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.engines.weights.START_WAIT_S", 60.0)
    held_weights.release()
    engine = start(path=held_weights.path)
    assert engine.scheduler._late is None
    assert [run(engine, "cold"), run(engine, "warm")] == [0, 4 * CHUNK]


def test_the_metrics_and_the_log_show_how_far_the_reading_is(
    start: StartEngine, held_weights: HeldWeights, caplog: pytest.LogCaptureFixture
) -> None:
    size = held_weights.file.stat().st_size
    with caplog.at_level(logging.INFO, "vllm.kvpool"):
        engine = start(path=held_weights.path)
    assert f"reading {size} bytes of weights" in caplog.text
    assert engine.scheduler.get_kv_connector_stats() is None
    held_weights.release()
    (reading,) = engine.scheduler._late.name.revision.readings
    assert reading.wait(60)
    assert engine.scheduler.get_kv_connector_stats().data == {"weights_bytes_read": size}
    engine.step()
    shown = engine.scheduler.get_kv_connector_stats()
    assert shown is None or "weights_bytes_read" not in shown.data


def test_weights_that_changed_meanwhile_are_refused_and_counted(
    start: StartEngine, held_weights: HeldWeights, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(path=held_weights.path)
    held_weights.file.write_bytes(b"other weights")
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        held_weights.let_begin(engine)
    assert "model.safetensors' has changed" in caplog.text
    assert engine.scheduler.get_kv_connector_stats().data["refusals_unknown_weights"] == 1
    assert [run(engine, "one"), run(engine, "two")] == [0, 0]


def test_weights_that_changed_in_place_meanwhile_are_not_taken_for_those_in_the_files(
    start: StartEngine, held_weights: HeldWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(path=held_weights.path)
    assert engine.new_weights()
    held_weights.let_begin(engine)
    engine.forget()
    assert [run(engine, "cold"), run(engine, "warm")] == [0, 4 * CHUNK]
    monkeypatch.setattr("kvpool_client.engines.weights.START_WAIT_S", 60.0)
    assert run(start(path=held_weights.path), "of the files") == 0


def test_a_connector_that_ends_while_weights_are_read_ends_its_reader(
    start: StartEngine, held_weights: HeldWeights
) -> None:
    engine = start(path=held_weights.path)
    late = engine.scheduler._late
    engine.close()
    assert late.is_ready


def test_requests_of_an_adapter_are_neither_loaded_nor_saved_until_its_files_were_read(
    start: StartEngine, held_weights: HeldWeights, daemon: Daemon
) -> None:
    engine, before = start(), daemon.stats()["saved_chunks"]
    lora = SimpleNamespace(lora_name="tuned", lora_path=held_weights.path, lora_int_id=1)
    assert [run(engine, f"early-{number}", lora) for number in range(2)] == [0, 0]
    assert daemon.stats()["saved_chunks"] == before
    assert run(engine, "base") == 0
    assert run(engine, "base again") == 4 * CHUNK
    assert run(engine, "still early", lora) == 0
    held_weights.release()
    adapters = engine.scheduler._scheduler._adapters
    wait_until(lambda: adapters.of(lora) is not None, "its files were read")
    assert [run(engine, "cold", lora), run(engine, "warm", lora)] == [0, 4 * CHUNK]


def test_an_engine_with_the_weights_before_stores_nothing_under_the_name_of_an_adapters_successor(
    start: StartEngine, held_weights: HeldWeights, daemon: Daemon
) -> None:
    held_weights.release()
    lora = SimpleNamespace(lora_name="tuned", lora_path=held_weights.path, lora_int_id=1)
    before, after = start(), start()
    wait_until(lambda: before.scheduler._scheduler._adapters.of(lora) is not None, "its files were read")
    assert [run(before, "cold", lora), run(before, "warm", lora)] == [0, 4 * CHUNK]
    held_weights.file.write_bytes(b"those that were trained since")
    stored = daemon.stats()["saved_chunks"]
    assert [run(before, "late", lora), run(before, "later", lora)] == [0, 0]
    assert daemon.stats()["saved_chunks"] == stored
    wait_until(lambda: after.scheduler._scheduler._adapters.of(lora) is not None, "its files were read")
    assert [run(after, "new", lora), run(after, "again", lora)] == [0, 4 * CHUNK]


@pytest.mark.parametrize("stages", [(3, 3), ()], ids=str)
def test_a_hybrid_engine_of_stages_begins_with_their_layers_and_its_name(
    start: StartEngine, held_weights: HeldWeights, stages: tuple[int, ...]
) -> None:
    """It awaits its stages' layers, then a name."""
    engine = joint(start, "windows", (2, stages), path=held_weights.path)
    assert run(engine, "early") == 0
    held_weights.let_begin(engine)
    assert [run(engine, "cold"), run(engine, "warm")] == [0, 4 * CHUNK]
