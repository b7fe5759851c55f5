"""Identity of the tier's rows: engines share them where weights and bytes are equal, and nowhere else."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import ConfigError, LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.vllm.tier.identity import Engine, identify
from kvpool_client.vllm.tier.settings import Settings
from tests.engines.vllm_tier.region import ROW_BYTES, Start, keys_of, spec_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.held_weights import HeldWeights

SETTINGS = Settings(socket="/nowhere")


def _named(spec: Any, engine: Engine | None = None, **settings: str) -> tuple[str, str, str]:
    """Name, revision and layout of an engine's rows."""
    chosen = replace(SETTINGS, **{"revision": "1", **settings})  # type: ignore[arg-type]  # texts
    found = identify(spec, ROW_BYTES, engine or Engine(), settings=chosen, environment={})
    revision = found.revision.find()
    assert revision is not None
    return found.name, revision, found.layout.format


def _changed(**facts: Any) -> Any:
    given = vars(spec_of().config)
    parts: dict[str, Any] = {
        name: SimpleNamespace(**{**vars(given[name]), **value}) for name, value in facts.items() if name != "config"
    }
    return spec_of(**parts, **facts.get("config", {}))


@pytest.mark.parametrize(
    "other",
    [
        _changed(model={"dtype": "float16"}),
        _changed(cache={"blocks_per_chunk": 2}),
        _changed(cache={"tokens_per_hash": 8}),
        _changed(parallel={"tp_size": 2, "world_size": 2}),
        _changed(parallel={"pp_size": 2, "world_size": 2}),
        _changed(parallel={"dcp_size": 2}),
        _changed(config={"kv_cache_layout": "BLHNC"}),
        _changed(config={"canonical_layout": True}),
        _changed(config={"worker_kv_bytes_per_block": ROW_BYTES // 2}),
        _changed(
            config={"groups": (SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layers.0", "layers.2")),)}
        ),
    ],
    ids=["dtype", "chunk", "hash", "tp", "pp", "dcp", "layout", "canonical", "block bytes", "layers"],
)
def test_what_changes_a_rows_bytes_parts_engines(other: Any) -> None:
    assert _named(spec_of()) == _named(spec_of())
    assert _named(spec_of()) != _named(other)


def test_rows_that_do_not_depend_on_parallelism_are_shared_by_all_sizes() -> None:
    sizes = [{"tp_size": size, "world_size": size, "is_parallelism_agnostic": True} for size in (1, 2)]
    canonical = [_changed(parallel=each, config={"canonical_layout": True}) for each in sizes]
    assert _named(canonical[0]) == _named(canonical[1])
    plain = [_changed(parallel=each) for each in sizes]
    assert _named(plain[0]) != _named(plain[1])
    one_copy = [_changed(parallel=each, config={"replicated_layout": True}) for each in sizes]
    assert _named(one_copy[0]) == _named(one_copy[1])


def _place(directory: Path, content: bytes) -> Any:
    place = directory / "model"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(content)
    (place / "config.json").write_text("{}")
    return spec_of(str(place))


def test_weights_of_other_content_part_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.engines.weights.process_began_ns", lambda: 1 << 62)
    reader = WeightsReader(DigestMemory(tmp_path / "digests"), logging.getLogger("test"))
    revisions = []
    for name, content in (("a", b"1" * 4096), ("b", b"2" * 4096), ("c", b"1" * 4096)):
        spec = _place(tmp_path / name, content)
        found = identify(spec, ROW_BYTES, Engine(), settings=SETTINGS, environment={})
        assert found.name == f"{name}/model"
        found.revision.begin_reading(reader)
        wait_until(lambda found=found: found.revision.find() is not None, "the weights are read")  # type: ignore[misc]
        revisions.append(found.revision.find())
    reader.stop()
    assert revisions[0] == revisions[2]
    assert revisions[0] != revisions[1]


def test_weights_that_have_changed_since_the_engines_start_are_refused(tmp_path: Path) -> None:
    spec = _place(tmp_path, b"1")
    for settings in (SETTINGS, replace(SETTINGS, model="mine")):
        with pytest.raises(LayoutMismatch, match="has changed since the engine started"):
            identify(spec, ROW_BYTES, Engine(), settings=settings, environment={})


def test_weights_that_nothing_identifies_are_refused_unless_the_operator_names_them() -> None:
    with pytest.raises(LayoutMismatch, match="set the tier's revision"):
        identify(spec_of("org/model"), ROW_BYTES, Engine(), settings=SETTINGS, environment={})
    assert _named(spec_of("org/model"), revision="a") != _named(spec_of("org/model"), revision="b")
    named = identify(
        spec_of("org/model"), ROW_BYTES, Engine(), settings=replace(SETTINGS, model="mine"), environment={}
    )
    assert named.name == "mine"


def _engine(**parallel: object) -> Engine:
    return Engine(config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (_engine(tensor_parallel_size=8, nnodes_within_dp=2, world_size=8), "ranks 4 to 7 cannot reach the daemon"),
        (
            _engine(tensor_parallel_size=2, distributed_executor_backend="ray", world_size=2),
            "Ray may place the 2 ranks",
        ),
    ],
)
def test_ranks_of_other_hosts_are_refused_by_name(engine: Engine, cause: str) -> None:
    with pytest.raises(LayoutMismatch, match=cause):
        identify(spec_of(), ROW_BYTES, engine, settings=SETTINGS, environment={})


def test_the_configuration_of_whoever_makes_a_tier_is_found() -> None:
    def make(vllm_config: object, kv_cache_config: object) -> Engine:
        return deeper(vllm_config=None) if vllm_config is kv_cache_config else deeper(vllm_config)

    def deeper(vllm_config: object) -> Engine:
        return Engine.of_caller()

    config, caches = SimpleNamespace(model_config=1), SimpleNamespace(kv_cache_groups=[])
    assert make(config, caches) == Engine(config, caches)
    assert Engine.of_caller() == Engine()


def test_an_engine_that_is_refused_misses_and_its_jobs_end(daemon: Daemon, start_region: Start) -> None:
    region = start_region(daemon, revision="", spec=spec_of("org/unknown"))
    keys = keys_of(1, 3)
    assert region.store(keys).is_whole is False
    context = region.begin(keys)
    assert region.found(context, keys) == [False] * 3
    assert region.load(keys, context).good == ()
    assert region.counts()["refused_requests_unknown_weights"] == 2
    region.jobs.drain()


def test_until_the_weights_are_read_everything_misses_and_no_call_waits(
    daemon: Daemon, start_region: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.engines.weights.process_began_ns", lambda: 1 << 62)
    monkeypatch.setattr("kvpool_client.engines.weights.START_WAIT_S", 0.0)
    weights = HeldWeights(tmp_path / "model", b"1" * 4096)
    weights.hold()
    region = start_region(daemon, revision="", spec=spec_of(weights.path))
    keys = keys_of(1, 3)
    assert not region.store(keys).is_whole
    assert region.found(region.begin(keys), keys) == [False] * 3
    assert region.counts()["refused_requests_reading"] == 2
    weights.release()

    def is_connected() -> bool:
        region.begin()
        return "connected" in repr(region.jobs)

    wait_until(is_connected, "the weights are known")
    assert region.store(keys).is_whole
    assert region.load(keys).is_whole


def test_wrong_settings_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.of({"sockte": "/x", "timeout_s": 0, "queue_jobs": True, "flush_on_reset": "no", "priority": 200})
    text = str(caught.value)
    for part in (
        "sockte is no setting, did you mean socket",
        "timeout_s is 0, expected 0.001..3600",
        "queue_jobs is True, expected 1..65536",
        "flush_on_reset is 'no', expected true or false",
        "priority is 200, expected 0..100",
    ):
        assert part in text
