"""Identity of the tier's rows: engines share them where weights and bytes are equal, and nowhere else."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.vllm.tier.identity import Engine, identify
from kvpool_client.vllm.tier.settings import Settings
from tests.engines.vllm_tier.region import ROW_BYTES, Start, keys_of, spec_of
from tests.rigs.daemon import Daemon, wait_until

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
    canonical = [
        _changed(
            parallel=each,
            config={"canonical_layout": True, "worker_kv_bytes_per_block": ROW_BYTES // int(each["world_size"])},
        )
        for each in sizes
    ]
    groups = [
        _engine_of({"dtype": "fp8", "num_kv_heads": 8 // int(each["world_size"]), "page_size_padded": None})
        for each in sizes
    ]
    assert _named(canonical[0], groups[0]) == _named(canonical[1], groups[1])
    assert _named(canonical[0], groups[0]) != _named(canonical[0], _engine_of({"dtype": "fp16", "num_kv_heads": 8}))
    plain = [_changed(parallel=each) for each in sizes]
    assert _named(plain[0]) != _named(plain[1])
    one_copy = [_changed(parallel=each, config={"replicated_layout": True}) for each in sizes]
    assert _named(one_copy[0]) == _named(one_copy[1])


def _engine_of(*specs: dict[str, Any], caches: dict[str, Any] | None = None, **config: Any) -> Engine:
    """An engine's configuration, with a group of layers of each spec."""
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(model="/models/tiny", dtype="bfloat16", hf_config=None, seed=0),
        "cache_config": SimpleNamespace(**{"cache_dtype": "fp8", "num_gpu_blocks": 7, **(caches or {})}),
        "load_config": SimpleNamespace(load_format="dummy"),
    }
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec), layer_names=["layers.0"]) for spec in specs]
    return Engine(SimpleNamespace(**{**parts, **config}), SimpleNamespace(kv_cache_groups=groups))


def test_formats_of_layers_and_states_part_engines() -> None:
    shapes = ((4, 128), (8, 64))
    by_layer = [{"a": SimpleNamespace(dtype=one), "b": SimpleNamespace(dtype=two)} for one, two in ("12", "21")]
    specs: list[dict[str, Any]] = [
        {"dtype": "fp8"},
        {"dtype": "bfloat16"},
        {"dtype": "fp8", "kv_quant_mode": 1},
        {"dtypes": ("float16", "float16"), "shapes": shapes},
        {"dtypes": ("bfloat16", "float16"), "shapes": shapes},
        *({"kv_cache_specs": each} for each in by_layer),
    ]
    words: list[dict[str, Any]] = [
        {"cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype_skip_layers": ["1"]},
        {"kv_cache_dtype_skip_layers": ["2"]},
        {"mamba_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "float16"},
        {"of_a_later_release": 1},
    ]
    engines = [_engine_of(spec) for spec in specs] + [_engine_of(specs[0], caches=each) for each in words]
    assert len({_named(spec_of(), engine) for engine in engines}) == len(engines)


def test_sizes_of_caches_part_nothing() -> None:
    sized = {
        "num_gpu_blocks": 9,
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype_skip_layers": [],
        "use_replayssm": False,
    }
    assert _named(spec_of(), _engine_of({"dtype": "fp8"})) == _named(
        spec_of(), _engine_of({"dtype": "fp8"}, caches=sized)
    )


def test_weights_that_may_change_in_place_share_within_one_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _engine_of({"dtype": "fp8"})
    engines = [
        _engine_of(weight_transfer_config=SimpleNamespace(backend="nccl")),
        _engine_of(lora_config=SimpleNamespace()),
    ]
    before = [_named(spec_of(), engine) for engine in engines]
    assert before == [_named(spec_of(), engine) for engine in engines]
    assert _named(spec_of(), plain) not in before
    monkeypatch.setattr("kvpool_client.vllm.tier.identity.LIFE", "of another start")
    assert all(_named(spec_of(), engine) not in before for engine in engines)


def test_adapters_are_refused_until_the_operator_answers_for_their_loads_in_place() -> None:
    with pytest.raises(LayoutMismatch, match=r"reset_prefix_cache\(reset_connector=True\) after each"):
        _named(spec_of(), _engine_of(lora_config=SimpleNamespace()), revision="")


@pytest.mark.parametrize(
    ("pages", "tokens", "blocks"),
    [
        (20001, 16, 16),
        (99991, 16, 16),
        (65537, 528, 1),
        (70001, 1000, 1),
        (524287, 16, 16),
        (1, 8192, 1),
        (1 << 20, 16, 64),
    ],
)
def test_rows_of_any_number_of_pages_have_a_layout(pages: int, tokens: int, blocks: int) -> None:
    spec = _changed(
        cache={"blocks_per_chunk": blocks},
        config={"groups": (SimpleNamespace(group_id=0, tokens_per_block=tokens, layer_names=("layers.0",)),)},
    )
    chosen = replace(SETTINGS, revision="1")
    layout = identify(spec, pages * 4096, Engine(), settings=chosen, environment={}).layout
    assert layout.chunk_bytes == layout.stored_bytes == pages * 4096


def test_rows_that_no_chunk_can_hold_are_refused_with_what_to_set() -> None:
    with pytest.raises(LayoutMismatch, match="set fewer blocks_per_chunk"):
        identify(spec_of(), (1 << 32) + 4096, Engine(), settings=replace(SETTINGS, revision="1"), environment={})


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
        (
            _engine(tensor_parallel_size=2, distributed_executor_backend="external_launcher", world_size=2),
            "each of the 2 ranks that a launcher has started has a region of its own",
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


def test_the_core_that_makes_a_tier_is_found() -> None:
    class Core:
        def __init__(self) -> None:
            self.engine = Scheduler().engine

        def collective_rpc(self) -> None:
            pass

    class Scheduler:
        def __init__(self) -> None:
            self.engine = Engine.of_caller()

    core = Core()
    assert core.engine == Engine(core=core)


def test_an_engine_that_is_refused_misses_and_its_jobs_end(daemon: Daemon, start_region: Start) -> None:
    region = start_region(daemon, revision="", spec=spec_of("org/unknown"))
    keys = keys_of(1, 3)
    assert region.store(keys).is_whole is False
    context = region.begin(keys)
    assert region.found(context, keys) == [False] * 3
    assert region.load(keys, context).good == ()
    assert region.counts()["refused_requests_unknown_weights"] == 2
    region.jobs.drain()
