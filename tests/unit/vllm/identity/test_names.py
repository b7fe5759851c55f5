"""The model name in the vLLM connector's keys: weights or commit, everything that changes KV, and nothing else."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.clock import NS_PER_S
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.vllm.identity.identity import AdapterNames, model_name
from kvpool_client.vllm.support import Unserved

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.daemon import wait_until
from tests.rigs.held_weights import begun_now
from tests.rigs.vllm.config import config_of

__all__ = ["begun_now"]
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("begun_now")]

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
OTHER_COMMIT = "11c5a3d5811f50298f278a704980280950aedb10"


class RecordedRevision(str):
    """huggingface_hub's ResolvedRevision as of 2.4: a string of what was asked for, with the commit beside it."""

    def __new__(cls, resolved: str, initial: str | None = None) -> "RecordedRevision":
        revision = super().__new__(cls, initial if initial is not None else "main")
        revision.initial = initial  # type: ignore[attr-defined]
        revision.resolved = resolved  # type: ignore[attr-defined]
        return revision


def revision_class(kind: str) -> Any:
    if kind == "recorded":
        return RecordedRevision
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    if not hasattr(hub, "ResolvedRevision"):
        pytest.skip(f"huggingface_hub {hub.__version__} has no ResolvedRevision")
    return hub.ResolvedRevision


def write_weights(directory: Path, middle: int = 0) -> str:
    """A safetensors file of two tensors of 64 KiB; `middle` is in the middle of the second."""
    directory.mkdir(exist_ok=True)
    size = 1 << 16
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "first": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
            "second": {"dtype": "U8", "shape": [size], "data_offsets": [size, 2 * size]},
        }
    ).encode()
    data = bytearray(2 * size)
    data[size + size // 2] = middle
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return str(directory)


READER = WeightsReader(DigestMemory(None), logging.getLogger(__name__))


def named(change: Callable[[Any], None], model: str = "") -> str:
    """The name and the revision, once the files were read."""
    config = config_of("/x")
    change(config)
    name = model_name(config, model)
    name.revision.begin_reading(READER)
    assert all(reading.wait(60) for reading in name.revision.readings)
    found = name.find()
    assert found
    return "@".join(found)


def adapter_name(lora: Any) -> str:
    """The name of an adapter that was never seen before."""
    return known_name(AdapterNames(READER), lora)


def known_name(names: AdapterNames, lora: Any) -> str:
    wait_until(lambda: names.of(lora) is not None, "the adapter's files are read")
    return names.of(lora) or ""


def with_model(**values: Any) -> Callable[[Any], None]:
    """Set fields of vLLM's model configuration."""

    def change(config: Any) -> None:
        for name, value in values.items():
            setattr(config.model_config, name, value)

    return change


def with_configuration(**values: Any) -> Callable[[Any], None]:
    """Set the model's own configuration, and the length it is served with."""
    longest = values.pop("longest", 4096)
    return with_model(hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 16, **values}), max_model_len=longest)


@pytest.mark.parametrize("kind", ["recorded", "real"])
def test_a_model_of_the_hub_is_named_by_its_commit_and_not_by_its_branch(kind: str) -> None:
    resolved = revision_class(kind)
    main = named(with_model(revision=resolved(COMMIT)))
    assert main == named(with_model(revision=resolved(COMMIT, "main")))
    assert main == named(with_model(revision=resolved(COMMIT, "v1.0")))
    assert main == named(with_model(revision=COMMIT))
    assert main != named(with_model(revision=resolved(OTHER_COMMIT, "main")))


@pytest.mark.parametrize("kind", ["recorded", "real"])
def test_the_name_of_a_commit_is_the_recorded_one(kind: str) -> None:
    """A changed name is a cold start of every pool, and needs a line in the changelog."""
    assert (
        named(with_model(revision=revision_class(kind)(COMMIT, "main"))) == "org/model@0e195770e261da500cc61071657c510b"
    )


def test_the_commit_of_the_configuration_is_used_where_vllm_resolved_none() -> None:
    known = SimpleNamespace(to_dict=lambda: {"hidden_size": 16}, _commit_hash=COMMIT)
    assert named(with_model(revision="main", hf_config=known)) == named(with_model(revision=COMMIT))
    assert named(with_model(revision=None, hf_config=known)) == named(with_model(revision=COMMIT))
    with pytest.raises(kv.LayoutMismatch, match="expected a commit"):
        named(with_model(revision="main", hf_config=known, hf_config_path="org/elsewhere"))


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "607a30d"])
def test_a_branch_that_may_move_is_refused_with_a_remedy(revision: str | None) -> None:
    with pytest.raises(kv.LayoutMismatch, match=r"expected a commit.*--revision.*kvpool\.model") as caught:
        named(with_model(revision=revision))
    assert str(revision) in str(caught.value) or revision is None
    assert named(with_model(revision=revision), "llama-seven").startswith("llama-seven@")


def test_weights_without_an_identity_need_an_operators_name(tmp_path: Path) -> None:
    place = with_model(model=str(tmp_path))
    with pytest.raises(kv.LayoutMismatch, match=r"no weights.*kvpool\.model"):
        named(place)
    assert named(place, "one") == named(place, "one") != named(place, "two")


def tensorizer(extra: object, **model: Any) -> Callable[[Any], None]:
    """The weights are in `.tensors`, where these settings have them."""

    def change(config: Any) -> None:
        with_model(**model)(config)
        config.load_config = SimpleNamespace(load_format="tensorizer", model_loader_extra_config=extra)

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_model(model_weights="s3://bucket/one"),
        tensorizer({"tensorizer_dir": "s3://bucket/one"}, model="s3://bucket/one", revision=COMMIT),
        *(
            tensorizer(extra)
            for key in ("tensorizer_uri", "tensorizer_dir")
            for extra in (
                {key: "s3://bucket/one"},
                {"tensorizer_config": {key: "s3://bucket/one"}},
                {"tensorizer_config": SimpleNamespace(**{key: "s3://bucket/one"})},
                SimpleNamespace(**{key: "s3://bucket/one"}),
            )
        ),
    ],
)
def test_weights_from_elsewhere_need_an_operators_name_whatever_the_commit_says(change: Callable[[Any], None]) -> None:
    with pytest.raises(kv.LayoutMismatch, match=r"s3://bucket/one.*kvpool\.model"):
        named(change)
    assert named(change, "one") != named(lambda _: None, "one")


def test_tensors_in_the_models_directory_are_its_weights(tmp_path: Path) -> None:
    place = write_weights(tmp_path / "model")
    tensors = tmp_path / "model" / "model.tensors"
    names = set()
    for content in (b"one", b"two"):
        tensors.write_bytes(content)
        found = {
            named(tensorizer({"tensorizer_config": extra}, model=place))
            for extra in (
                {"tensorizer_dir": place},
                {"tensorizer_dir": f"{place}/"},
                {"tensorizer_uri": str(tensors), "tensorizer_dir": None},
            )
        }
        assert len(found) == 1
        names |= found
    assert len(names) == 2
    with pytest.raises(kv.LayoutMismatch, match="the weights come from"):
        named(tensorizer({"tensorizer_dir": str(tmp_path)}, model=place))


def test_an_operators_name_joins_paths_and_never_different_weights(tmp_path: Path) -> None:
    here, there = write_weights(tmp_path / "here"), write_weights(tmp_path / "there")
    assert named(with_model(model=here), "one") == named(with_model(model=there), "one")
    write_weights(tmp_path / "there", middle=1)
    assert named(with_model(model=here), "one") != named(with_model(model=there), "one")


def test_the_name_follows_the_weights_and_not_their_path(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "org").mkdir(parents=True)
    here, there = (write_weights(tmp_path / place / "org" / "model") for place in ("here", "there"))
    assert named(with_model(model=here)) == named(with_model(model=there))
    write_weights(Path(there), middle=1)
    assert named(with_model(model=here)) != named(with_model(model=there))


@pytest.mark.parametrize("offset", [0, 100, 1 << 16, (2 << 16) - 1])
def test_every_byte_of_the_weights_is_in_the_name(tmp_path: Path, offset: int) -> None:
    place = write_weights(tmp_path / "model")
    before = named(with_model(model=place))
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1 - offset, 2)
        file.write(b"!")
    assert named(with_model(model=place)) != before


def test_the_models_own_code_is_in_the_name(tmp_path: Path) -> None:
    place = write_weights(tmp_path / "model")
    before = named(with_model(model=place))
    (tmp_path / "model" / "modeling_own.py").write_text("scale = 2")
    assert named(with_model(model=place)) != before


def test_files_that_have_changed_since_the_process_began_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has read its weights in between: those before, or these."""
    place = write_weights(tmp_path / "model")
    began_ns = (tmp_path / "model" / "model.safetensors").stat().st_ctime_ns
    monkeypatch.setattr("kvpool_client.engines.weights.process_began_ns", lambda: began_ns)
    assert named(with_model(model=place))
    monkeypatch.setattr("kvpool_client.engines.weights.process_began_ns", lambda: began_ns - NS_PER_S)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(model=place, revision=None))
    for change in (with_model(model=place), lambda config: setattr(config, "speculative_config", draft)):
        with pytest.raises(Unserved, match=r"model\.safetensors' has changed since the engine started"):
            named(change)
        with pytest.raises(Unserved, match="has changed"):
            named(change, "an operator's name")


def test_files_that_change_while_they_are_read_are_refused_by_name(tmp_path: Path) -> None:
    config = config_of("/x")
    config.model_config.model = write_weights(tmp_path / "model")
    name = model_name(config)
    assert name.find() is None, "nothing was read"
    write_weights(tmp_path / "model", middle=1)
    name.revision.begin_reading(READER)
    with pytest.raises(Unserved, match=r"model\.safetensors.* has changed.*start the engine again") as caught:
        name.find()
    assert caught.value.code == "unknown_weights"


OTHERS = {
    "revision": OTHER_COMMIT,
    "model": "org/other",
    "architecture": "OtherForCausalLM",
    "code_revision": "other",
    "dtype": "float32",
    "quantization": "fp8",
    "quantization_config": {"linear": "int8"},
    "hf_overrides": {"rope_theta": 5.0},
    "override_attention_dtype": "float8",
    "multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 448}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_what_changes_kv_changes_the_name(field: str) -> None:
    assert named(with_model(**{field: OTHERS[field]})) != named(lambda _: None)


@pytest.mark.parametrize(
    "same",
    [
        with_model(max_model_len=512),
        with_model(max_model_len=131072, original_max_model_len=None),
        with_model(tokenizer_revision="main", served_model_name="chat", seed=7, max_logprobs=1, enforce_eager=True),
        with_model(hf_overrides=lambda config: config),
        with_configuration(_name_or_path="/moved", transformers_version="6.0", eos_token_id=5, use_cache=False),
        with_configuration(a_field_of_a_later_release=None, max_model_len=2048),
        with_configuration(rope_parameters={"rope_type": "default"}, longest=512),
    ],
    ids=["shorter", "longer", "serving", "a-function", "place-and-use", "not-set", "rope"],
)
def test_what_changes_no_kv_does_not_change_the_name(same: Callable[[Any], None]) -> None:
    config = config_of("/x")
    same(config)
    has_rope = "rope_parameters" in config.model_config.hf_config.to_dict()
    base = with_configuration(rope_parameters={"rope_type": "default"}) if has_rope else (lambda _: None)
    assert named(same) == named(base)


@pytest.mark.parametrize(
    ("configuration", "length", "same", "other"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096, 2048, 8192),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 8192, 131072, 4096),
        ({"text_config": {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}}, 4096, 512, 4097),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096, 4096, 8192),
        ({"rope_scaling": {"type": "a-later-one"}}, 4096, 4096, 8192),
        ({"rope_scaling": {"rope_type": "longrope"}}, 4096, 4096, 8192),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, 32768, 4096, 32769),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096, 32768, None),
    ],
    ids=["longrope", "longrope-parameters", "inside", "dynamic", "unknown", "no-original", "llama4", "yarn"],
)
def test_a_length_that_kv_depends_on_keeps_its_factors(
    configuration: dict[str, Any], length: int, same: int, other: int | None
) -> None:
    name = named(with_configuration(**configuration, longest=length))
    assert named(with_configuration(**configuration, longest=same)) == name
    assert other is None or named(with_configuration(**configuration, longest=other)) != name


def test_the_models_own_configuration_is_part_of_the_name() -> None:
    assert named(with_configuration(rope_theta=5.0)) != named(lambda _: None)
    assert named(with_configuration(text_config={"rope_theta": 5.0})) != named(with_configuration(text_config={}))


def test_values_that_vllm_writes_into_a_workers_configuration_change_no_name() -> None:
    """vLLM notes in the configuration of the process that builds the model, which the scheduler's does not."""
    assert named(with_configuration(max_model_len=77, attn_temperature_tuning=True)) == named(with_configuration())


def test_a_draft_model_is_part_of_the_name(tmp_path: Path) -> None:
    def drafting(path: str) -> Callable[[Any], None]:
        draft = SimpleNamespace(draft_model_config=SimpleNamespace(model=path, revision=None))
        return lambda config: setattr(config, "speculative_config", draft)

    here, there = write_weights(tmp_path / "here"), write_weights(tmp_path / "there", middle=1)
    assert named(drafting(here)) != named(lambda _: None)
    assert named(drafting(here)) != named(drafting(there))
    assert named(drafting("org/model")) == named(lambda _: None), "the model guesses for itself"


def test_random_weights_are_identified_by_their_seed() -> None:
    def dummy(seed: int) -> Callable[[Any], None]:
        def change(config: Any) -> None:
            config.load_config = SimpleNamespace(load_format="dummy")
            config.model_config.seed = seed

        return change

    assert named(dummy(1)) == named(dummy(1)) != named(dummy(2))


def test_an_adapter_is_identified_by_name_path_and_weights(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "lora")
    lora = SimpleNamespace(lora_name="tuned", lora_path=path)
    before = adapter_name(lora)
    assert AdapterNames(READER).of(None) == ""
    assert adapter_name(SimpleNamespace(lora_name="other", lora_path=path)) != before
    write_weights(tmp_path / "lora", middle=1)
    assert adapter_name(lora) != before


def test_what_scales_an_adapter_is_part_of_its_name(tmp_path: Path) -> None:
    lora = SimpleNamespace(lora_name="tuned", lora_path=write_weights(tmp_path / "lora"))
    names = [adapter_name(lora)]
    for alpha in (16, 64):
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        names.append(adapter_name(lora))
    assert len(set(names)) == 3


def successor(tmp_path: Path) -> None:
    """Other weights are in the place of the adapter's, as those that were trained since."""
    write_weights(tmp_path / "other", middle=1)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "lora" / "model.safetensors")


def lora_of(path: str, number: int = 1) -> Any:
    return SimpleNamespace(lora_name="tuned", lora_path=path, lora_int_id=number)


def test_an_adapter_whose_files_have_changed_has_no_name_until_it_is_loaded_again(tmp_path: Path) -> None:
    known, lora = AdapterNames(READER), lora_of(write_weights(tmp_path / "lora"))
    before = known_name(known, lora)
    assert known.of(lora) == before
    files = (tmp_path / "lora" / "model.safetensors").read_bytes()
    successor(tmp_path)
    for _ in range(2):
        with pytest.raises(kv.LayoutMismatch, match=r"model\.safetensors' has changed.*load the adapter again"):
            known.of(lora)
    again = lora_of(lora.lora_path, number=2)
    assert known_name(known, again) == adapter_name(again) != before
    (tmp_path / "lora" / "model.safetensors").write_bytes(files)
    with pytest.raises(kv.LayoutMismatch, match="has changed"):
        known.of(lora)


def test_an_adapter_whose_files_change_while_they_are_read_has_no_name(tmp_path: Path) -> None:
    unread = WeightsReader(DigestMemory(None), logging.getLogger(__name__))
    unread.stop()
    known, lora = AdapterNames(unread), lora_of(write_weights(tmp_path / "lora"))
    assert known.of(lora) is None
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(kv.LayoutMismatch, match=r"adapter_config\.json' has changed"):
        known.of(lora)


def test_an_adapter_is_not_forgotten_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.vllm.identity.identity.ADAPTERS_MAX", 1)
    known, lora = AdapterNames(READER), lora_of(write_weights(tmp_path / "lora"))
    before = known_name(known, lora)
    with pytest.raises(kv.LayoutMismatch, match="'tuned' is one more than the 1 that are remembered"):
        known.of(lora_of(lora.lora_path, number=2))
    assert known.of(lora) == before


def test_an_adapter_without_local_files_is_identified_by_the_engines_number_too() -> None:
    first, second = (SimpleNamespace(lora_name="a", lora_path="hub/adapter", lora_int_id=number) for number in (1, 2))
    assert adapter_name(first) == adapter_name(first) != adapter_name(second)


@pytest.mark.parametrize("word", ["dtype", "architectures", "torch_dtype"])
def test_words_without_effect_on_a_model_count_where_they_affect_kv(word: str) -> None:
    def quantized(value: str) -> Callable[[Any], None]:
        return with_configuration(quantization_config={"layers": {"0": {word: value}}}, text_config={"dtype": value})

    assert named(quantized("int4")) != named(quantized("int8"))
    assert named(with_configuration(text_config={word: "a"})) == named(with_configuration(text_config={word: "b"}))


def test_attention_that_the_generations_configuration_tunes_changes_the_name(tmp_path: Path) -> None:
    names = [named(with_model(override_generation_config={"attn_temperature_tuning": on})) for on in (True, False)]
    assert len({*names, named(with_model())}) == 3
    assert named(with_model(override_generation_config={"temperature": 0.5})) == named(with_model())
