"""Names of TensorRT-LLM's weights and LoRA adapters: equal where their KV is, different where it is not, else refused."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.clock import NS_PER_S
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights_reading import WeightsReader, WeightsReading
from kvpool_client.trtllm import Settings
from kvpool_client.trtllm.adapters import Adapters
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.held_weights import HeldWeights, begun_now, held_weights

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from tests.engines.trtllm.interface import COMMIT, llm_args  # noqa: E402
from tests.engines.trtllm.standin import Executor  # noqa: E402

__all__ = ["begun_now", "held_weights"]
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("begun_now")]

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
Start = Callable[..., Executor]
READER = WeightsReader(DigestMemory(None), logging.getLogger(__name__))


def _settings(environment: dict[str, str] | None = None, **fields: Any) -> Settings:
    """The settings, once the files of the weights were read."""
    found = Settings.read(llm_args(**fields), environment or {}, "1")
    if found.later is not None:
        found.later.begin_reading(READER)
        assert all(reading.wait(60) for reading in found.later.readings)
    return found.named()


def _model(directory: Path, seed: int = 0, configuration: str = "{}") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "model.bin").write_bytes(np.random.default_rng(seed).bytes(20000))
    (directory / "config.json").write_text(configuration)
    return str(directory)


def test_a_model_directory_is_named_by_its_weights(tmp_path: Path) -> None:
    here = _settings(model=_model(tmp_path / "a"), revision=None)
    assert here.refusal == ""
    assert here.revision == _settings(model=str(tmp_path / "a"), revision="other").revision
    tuned = _settings(model=_model(tmp_path / "a", seed=1), revision=None)
    assert tuned.revision != here.revision
    scaled = _settings(model=_model(tmp_path / "a", seed=1, configuration='{"rope_theta": 1}'), revision=None)
    assert scaled.revision != tuned.revision


def test_weights_that_have_changed_since_the_process_began_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, clock = _model(tmp_path / "a"), "kvpool_client.engines.weights.process_began_ns"
    monkeypatch.setattr(clock, lambda: (tmp_path / "a" / "model.bin").stat().st_ctime_ns - NS_PER_S)
    refusal = _settings(model=place, revision=None).refusal
    assert "has changed since the engine started" in refusal
    assert "TLLM_KVPOOL_REVISION" in refusal
    assert _settings({"TLLM_KVPOOL_REVISION": "7"}, model=place).refusal == ""


@pytest.mark.parametrize("field", ["dtype", "quant_config", "model_kwargs", "kv_dtype"])
def test_what_changes_kv_beside_the_weights_is_in_the_name(field: str) -> None:
    changed: dict[str, Any] = {field: "fp8"}
    assert _settings(**changed).revision != _settings().revision
    assert _settings(**changed).revision == _settings(**changed).revision


def test_a_model_of_the_hub_is_named_by_the_commit_that_is_cached(tmp_path: Path) -> None:
    references = tmp_path / "hub" / "models--org--tiny" / "refs"
    references.mkdir(parents=True)
    environment = {"HF_HOME": str(tmp_path)}
    names = {"model": "org/tiny", "revision": None}
    unknown = _settings(environment, **names)
    assert "TLLM_KVPOOL_REVISION" in unknown.refusal
    (references / "main").write_text(COMMIT)
    first = _settings(environment, **names)
    assert (first.refusal, first.revision) == ("", _settings(model="org/tiny", revision=COMMIT).revision)
    (references / "main").write_text(COMMIT[::-1])
    assert _settings(environment, **names).revision != first.revision


def test_an_operators_name_identifies_weights_without_an_identity() -> None:
    given = _settings({"TLLM_KVPOOL_REVISION": "7"}, revision=None)
    assert given.refusal == ""
    assert given.revision != _settings({"TLLM_KVPOOL_REVISION": "8"}, revision=None).revision


def test_two_engines_number_one_adapter_differently_and_share_it(
    shared_daemon: Daemon, start_trtllm: Start, tmp_path: Path
) -> None:
    first, second = start_trtllm(shared_daemon), start_trtllm(shared_daemon, manager="v1")
    weights, others = np.arange(64, dtype=np.float32), np.arange(1, 65, dtype=np.float32)
    assert first.answer(PROMPT, lora_task_id=1, lora_weights=torch.from_numpy(weights))[0] == 0
    assert second.answer(PROMPT, lora_task_id=1, lora_weights=others)[0] == 0
    assert second.answer(PROMPT, lora_task_id=9, lora_weights=weights)[0] == 28
    assert second.answer(PROMPT, lora_task_id=9)[0] == 28, "the engine sends an adapter's weights once"
    assert second.answer(PROMPT)[0] == 0


def test_an_adapter_in_a_directory_is_named_by_weights_and_scale(tmp_path: Path) -> None:
    adapters, names = Adapters(READER), []
    for number, (seed, scale) in enumerate([(0, 1), (0, 1), (0, 2), (1, 1)]):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "adapter_model.bin").write_bytes(bytes([seed]) * 5000)
        (directory / "adapter_config.json").write_text(f'{{"lora_alpha": {scale}}}')
        os.utime(directory / "adapter_model.bin", (1, 1))
        request = SimpleNamespace(lora_task_id=number, py_lora_path=str(directory))
        wait_until(lambda request=request: bool(adapters.name_of(request)[0]), "the adapter's files are read")  # type: ignore[misc]  # bound now
        names.append(adapters.name_of(request)[0])
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(names)


def _adapter(tmp_path: Path, number: int = 1) -> SimpleNamespace:
    (tmp_path / "adapter_model.bin").write_bytes(b"weights")
    return SimpleNamespace(lora_task_id=number, py_lora_path=str(tmp_path))


def test_an_adapter_is_what_its_files_were_at_its_first_request(tmp_path: Path) -> None:
    adapters, request = Adapters(READER), _adapter(tmp_path)
    wait_until(lambda: bool(adapters.name_of(request)[0]), "the adapter's files are read")
    before = adapters.name_of(request)
    (tmp_path / "adapter_model.bin").write_bytes(b"those that were trained since")
    assert adapters.name_of(request) == before, "the engine has it in memory"
    other = SimpleNamespace(lora_task_id=2, py_lora_path=str(tmp_path))
    wait_until(lambda: bool(adapters.name_of(other)[0]), "the adapter's files are read")
    assert adapters.name_of(other) != before


def test_an_adapter_whose_files_change_while_they_are_read_has_no_name(tmp_path: Path) -> None:
    reader = WeightsReader(DigestMemory(None), logging.getLogger(__name__))

    def change_and_begin(reading: WeightsReading) -> None:
        (tmp_path / "adapter_config.json").touch()
        READER.begin_reading(reading)

    reader.begin_reading = change_and_begin  # type: ignore[method-assign]
    adapters, request = Adapters(reader), _adapter(tmp_path)
    assert adapters.name_of(request)[0] == ""
    wait_until(lambda: "has changed" in adapters.name_of(request)[1], "the adapter is refused")
    assert adapters.name_of(request)[0] == ""


def test_an_adapter_is_not_forgotten_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.trtllm.adapters.ADAPTERS_MAX", 1)
    adapters, request = Adapters(READER), _adapter(tmp_path)
    wait_until(lambda: bool(adapters.name_of(request)[0]), "the adapter's files are read")
    name, refusal = adapters.name_of(_adapter(tmp_path, 2))
    assert (name, "one more than" in refusal) == ("", True)
    assert adapters.name_of(request)[0]


def test_an_adapter_without_visible_weights_is_not_served_and_logged_once(
    shared_daemon: Daemon, start_trtllm: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine, before = start_trtllm(shared_daemon), shared_daemon.stats()["saved_chunks"]
    with caplog.at_level(logging.WARNING):
        engines: tuple[dict[str, Any], ...] = ({}, {}, {"py_lora_path": str(tmp_path)}, {"py_lora_path": "/no/such"})
        for fields in engines:
            assert engine.answer(PROMPT, lora_task_id=3, **fields)[0] == 0
    assert shared_daemon.stats()["saved_chunks"] == before
    assert engine.scheduler.half.stats()["refused_lora"] == 4
    logged = [record.message for record in caplog.records if "LoRARequest" in record.message]
    assert len(logged) == 1


def test_refusals_are_counted_in_the_registry_that_the_engine_shows(shared_daemon: Daemon, start_trtllm: Start) -> None:
    registry = pytest.importorskip("prometheus_client").REGISTRY

    def shown(reason: str) -> float:
        labels = {"engine": "trtllm", "reason": reason}
        return float(registry.get_sample_value("kvpool_engine_refused_total", labels) or 0)

    before = {reason: shown(reason) for reason in ("inputs", "engine")}
    start_trtllm(shared_daemon).answer(PROMPT, multimodal_hashes=[[1]])
    start_trtllm(shared_daemon, warm=False, pipeline_parallel_size=2).answer(PROMPT)
    assert {reason: shown(reason) - before[reason] for reason in before} == {"inputs": 1, "engine": 1}


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_while_weights_are_read_requests_are_refused_and_then_they_are_shared(
    shared_daemon: Daemon, start_trtllm: Start, held_weights: HeldWeights, manager: str
) -> None:
    given: dict[str, Any] = {"model": held_weights.path, "settings": {"REVISION": ""}, "manager": manager}
    engine, before = start_trtllm(shared_daemon, warm=False, **given), shared_daemon.stats()["saved_chunks"]
    assert [engine.answer(PROMPT)[0] for _ in range(2)] == [0, 0]
    assert shared_daemon.stats()["saved_chunks"] == before
    counts = engine.scheduler.half.stats()
    assert counts["refused_reading"] == 2
    assert counts["weights_bytes"] == held_weights.file.stat().st_size + len("{}")
    held_weights.release()
    engine.warm_up()
    assert [engine.answer(PROMPT)[0] for _ in range(2)] == [0, 28]
    other = start_trtllm(shared_daemon, **given)
    assert other.answer(PROMPT)[0] == 28


def test_weights_that_changed_while_they_were_read_are_refused_with_the_remedy(
    shared_daemon: Daemon, start_trtllm: Start, held_weights: HeldWeights, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"model": held_weights.path, "settings": {"REVISION": ""}}
    engine = start_trtllm(shared_daemon, warm=False, **given)
    held_weights.file.write_bytes(b"other weights")
    held_weights.release()

    def is_refused() -> bool:
        engine.answer(PROMPT)
        return "refused_engine" in engine.scheduler.half.stats()

    with caplog.at_level(logging.WARNING):
        wait_until(is_refused, "the weights are refused")
    assert "model.safetensors' has changed" in caplog.text
    assert "set TLLM_KVPOOL_REVISION" in caplog.text
    assert [engine.answer(PROMPT)[0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": object()}, "remove it"),
        ({"kv_dtype": "nvfp4"}, "auto or fp8"),
        ({"revision": None}, "TLLM_KVPOOL_REVISION"),
    ],
)
def test_every_refusal_of_an_engine_names_its_remedy(fields: dict[str, Any], remedy: str) -> None:
    assert remedy in _settings({"HF_HOME": "/no/such"}, **fields).refusal
