"""Identity of the model: the name and the revision under which its chunks are stored.

KV of equal tokens differs with the weights, so beside the model's own name stands a digest of all that changes it: the model's
configuration, and its weights, by every byte where they are in a directory, by the commit where they come from the Hub, or by
the operator's name. Two random models of one shape therefore never share, nor do a model and its fine-tuned successor in the
same directory. What changes no KV is not included: paths, branches, lengths, how tokens are generated. Hardware, block sizes
and formats are not here either; these are the layout's.

The files of weights are read in the background, once (`weights_reading`), the others at the engine's start. Any thread.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.length_facts import configuration_of, length_facts
from kvpool_client.engines.weights import Revision, Weights, loaded_files
from kvpool_client.engines.weights_reading import WeightsReader, WeightsReading
from kvpool_client.vllm.support import REMEDIES, Unserved
from kvpool_client.vllm.surface import EngineConfig, LoraRequest

NAME_CHARACTERS_MAX = 300
# Fields of vLLM's model configuration that change KV without changing the model's own configuration.
MODEL_FIELDS = (
    "architecture",
    "code_revision",
    "dtype",
    "quantization",
    "quantization_config",
    "override_attention_dtype",
)
# Fields that define how images and sound become inputs of tokens.
MEDIA_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
TUNING = "attn_temperature_tuning"
# Fields of a model's own configuration that change no KV: its path and how it is used. vLLM writes the last two there itself,
# in workers alone (see `length_facts`).
IRRELEVANT = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "id2label",
    "label2id",
    "problem_type",
    "max_model_len",
    TUNING,
}
# A sub-model's configuration is recognized by this end of its key. The same words elsewhere (as in quantization) may mean KV.
SUB_MODEL, NO_SUB_MODEL = "_config", "quantization_config"
ADAPTER_CONFIGURATION = "adapter_config.json"
# One that was forgotten would be taken for what its files are now: so none is, and there is no name for more. Of each some 1500
# bytes are remembered.
ADAPTERS_MAX = 16384
LIFE = os.urandom(16).hex()
# Stands for an adapter that has no name: no chunk is stored under it.
UNNAMED_ADAPTER = f"{LIFE} unnamed"
COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
# Settings of load formats that name the weights' own place, which may be another one than the model's, and that hold such ones.
PLACES = ("tensorizer_uri", "tensorizer_dir")
NESTED = "tensorizer_config"
UNKNOWN = "unknown_weights"


class ModelName:
    """The pool's name for a model, and the revision of its weights and settings, which is known when its files were read."""

    def __init__(self, name: str, revision: Revision) -> None:
        self._name = name
        self.revision = revision

    def __repr__(self) -> str:
        return f"<ModelName {self._name} {self.revision!r}>"

    def find(self) -> tuple[str, str] | None:
        """Name and revision; None while files are read. Raises Unserved where they cannot be read, or have changed."""
        try:
            revision = self.revision.find()
        except LayoutMismatch as error:
            raise Unserved(UNKNOWN, str(error)) from error
        return None if revision is None else (self._name, revision)


def model_name(config: EngineConfig, named: str = "") -> ModelName:
    """The pool's name for the model, whose readings are to be begun.

    `named`: the operator's name for it (`kvpool.model`). Raises Unserved where nothing identifies the weights.
    """
    model = config.model_config
    name = str(getattr(model, "model", ""))
    values = configuration_of(getattr(model, "hf_config", None))
    overrides, media = getattr(model, "hf_overrides", None), getattr(model, "multimodal_config", None)
    facts: dict[str, object] = {
        **{field: str(getattr(model, field, None)) for field in MODEL_FIELDS},
        **{field: str(getattr(media, field, None)) for field in MEDIA_FIELDS},
        "configuration": _kept(values),
        "overrides": _kept(overrides) if isinstance(overrides, Mapping) else "",
        "length": length_facts(values, getattr(model, "max_model_len", None)),
        "tuning": _generation_tuning(model),
        "hashes": str(getattr(config.cache_config, "prefix_caching_hash_algo", "")),
    }
    short = "/".join(name.rstrip("/").rsplit("/", 2)[-2:])
    try:
        weights, draft = _weights_of(config, named), _draft_of(config)
    except LayoutMismatch as error:
        raise error if isinstance(error, Unserved) else Unserved(UNKNOWN, str(error)) from error
    return ModelName((named or short)[-NAME_CHARACTERS_MAX:], Revision(facts, weights=weights, draft=draft))


def _generation_tuning(model: object) -> list[object]:
    """A key of the generation configuration tunes Llama 4's attention: the model's own, or the one given to vLLM."""
    given = getattr(model, "override_generation_config", None)
    path = Path(str(getattr(model, "model", ""))) / "generation_config.json"
    try:
        own = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError):
        own = {}
    text = [values.get(TUNING) for values in (own, given) if isinstance(values, Mapping)]
    return [value for value in text if value is not None]


class AdapterNames:
    """The names that separate the chunks of LoRA adapters: made of name, path, weights and scaling. One thread.

    An adapter is what its files were at its first request: vLLM has it in memory from then on, whatever happens to them. Once
    they have changed it is not known which of them vLLM has, because it reads them again where it had no room for the adapter:
    it has no name until vLLM loads it under another number. An adapter whose files are not on this node shares chunks only
    within this process: nothing identifies its weights.
    """

    def __init__(self, reader: WeightsReader) -> None:
        self._reader = reader
        self._known: dict[tuple[object, ...], tuple[WeightsReading, Revision]] = {}

    def __repr__(self) -> str:
        return f"<AdapterNames of {len(self._known)}>"

    def of(self, lora: LoraRequest | None) -> str | None:
        """The adapter's name, empty without one; None while its files are read. Raises LayoutMismatch where they cannot be
        read, or have changed."""
        if lora is None:
            return ""
        path, number = str(getattr(lora, "lora_path", "")), getattr(lora, "lora_int_id", 0)
        place = (lora.lora_name, path, number)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= ADAPTERS_MAX:
                raise LayoutMismatch(
                    f"adapter {lora.lora_name!r} is one more than the {ADAPTERS_MAX} that are remembered"
                )
            files = WeightsReading(Path(path), (ADAPTER_CONFIGURATION,))
            weights = files if files.has_files else f"{LIFE} {number}"
            known = files, Revision({"name": lora.lora_name, "path": path}, weights=weights)
            self._known[place] = known
            if files.has_files:
                self._reader.begin_reading(files)
        files, name = known
        if changed := files.first_changed():
            raise LayoutMismatch(
                f"{changed!r} has changed since the adapter's first request, expected the files that vLLM has loaded: "
                "load the adapter again (/v1/unload_lora_adapter, /v1/load_lora_adapter)"
            )
        return name.find()

    def stop(self) -> None:
        """End the reader."""
        self._reader.stop()


def _weights_of(config: EngineConfig, named: str) -> Weights:
    """The identity of the weights: a reading of them, or their commit, or the operator's name."""
    model, load = config.model_config, getattr(config, "load_config", None)
    name = str(getattr(model, "model", ""))
    if str(getattr(load, "load_format", "")).endswith("dummy"):
        return f"dummy {getattr(model, 'seed', None)}"
    elsewhere = _places_beside(name, getattr(load, "model_loader_extra_config", None))
    elsewhere += [uri] if (uri := getattr(model, "model_weights", "")) else []
    if elsewhere:
        if named:
            return f"{elsewhere[0]}"
        raise Unserved(UNKNOWN, f"the weights come from {elsewhere[0]!r}, where they may change unseen")
    path = Path(name)
    if path.exists():
        reading = loaded_files(path)
        if not reading.has_files and not named:
            raise Unserved(UNKNOWN, f"no weights in {name!r} distinguish one version of the model from another")
        return reading if reading.has_files else ""
    commit = _commit_of(model)
    if not commit and not named:
        revision = getattr(model, "revision", None)
        text = f"revision {str(revision)!r}, which may move," if revision else "nothing"
        raise Unserved(
            UNKNOWN,
            f"{text} identifies the weights of {name!r} that are served, expected a commit",
            f"give vLLM --revision with the commit's 40 digits, or {REMEDIES[UNKNOWN]}",
        )
    return f"{name} {commit}"


def _places_beside(name: str, extra: object) -> list[str]:
    """The places of weights that a load format's settings name, without the model's directory and files in it."""
    settings = _settings_of(extra)
    nested = _settings_of(settings.get(NESTED))
    named = [str(each[key]) for each in (settings, nested) for key in PLACES if each.get(key)]
    is_read = Path(name).is_dir()
    return [place for place in named if not is_read or Path(name) not in (Path(place), Path(place).parent)]


def _settings_of(value: object) -> Mapping[str, object]:
    """Those of a mapping, or of an object, as vLLM has some."""
    found: object = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return found if isinstance(found, Mapping) else {}


def _commit_of(model: object) -> str:
    """The commit that a model of the Hub comes from; empty where it is unknown.

    huggingface_hub's ResolvedRevision is, as a string, the requested revision, and has the commit as an attribute. A
    configuration with a path of its own has its own commit, which does not identify the weights.
    """
    revision = getattr(model, "revision", None)
    has_own_place = getattr(model, "hf_config_path", None) not in (None, getattr(model, "model", None))
    known = (
        getattr(revision, "resolved", None),
        None if has_own_place else getattr(getattr(model, "hf_config", None), "_commit_hash", None),
        revision,
    )
    return next((str(commit) for commit in known if COMMIT.fullmatch(str(commit))), "")


def _draft_of(config: EngineConfig) -> Weights:
    """The draft model whose KV may be beside the model's. A wrong one costs accepted guesses and changes no token: its path is
    enough where nothing else identifies it."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    name = str(getattr(draft, "model", ""))
    if draft is None or name == str(getattr(config.model_config, "model", "")):
        return ""
    reading = loaded_files(Path(name))
    return reading if reading.has_files else f"{name} {_commit_of(draft)}"


def _kept(value: object, *, is_model: bool = True) -> object:
    """A configuration without fields that change no KV, and without unset fields: a new release has more of those."""
    if not isinstance(value, Mapping):
        return value
    dropped = IRRELEVANT if is_model else ()
    entries = sorted((str(key), entry) for key, entry in value.items() if entry is not None and key not in dropped)
    return {key: _kept(entry, is_model=key.endswith(SUB_MODEL) and key != NO_SUB_MODEL) for key, entry in entries}
