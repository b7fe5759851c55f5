"""Which model this is: the name and the revision under which its chunks are kept.

KV of equal tokens differs with the weights, so beside the model's own name stands a digest of its revision, its whole
configuration, and of the weights where they lie in a directory: sizes, headers and a sample of every tensor. Two random models
of one shape therefore never meet, nor do a model and its fine-tuned successor in the same place. What is not here: hardware,
block sizes and formats; these are the layout's.

Reads files once, at the engine's start. Any thread.
"""

import json
from pathlib import Path

from kvpool.errors import LayoutMismatch
from kvpool_client.vllm.surface import EngineConfig, LoraRequest
from kvpool_client.weights import digest_of, directory_digest

NAME_CHARACTERS_MAX = 300
# What of vLLM's model configuration changes KV without changing the model's own configuration.
MODEL_FIELDS = (
    "revision",
    "code_revision",
    "dtype",
    "quantization",
    "max_model_len",
    "hf_overrides",
    "override_attention_dtype",
)


def model_and_revision(config: EngineConfig) -> tuple[str, str]:
    """The pool's name for the model, and what tells its weights and settings from others.

    Raises LayoutMismatch where nothing says which weights these are.
    """
    model = config.model_config
    name = str(getattr(model, "model", ""))
    facts: dict[str, object] = {field: str(getattr(model, field, None)) for field in MODEL_FIELDS}
    facts["name"] = name
    facts["configuration"] = _configuration_of(getattr(model, "hf_config", None))
    facts["weights"] = _weights_of(config, name)
    facts["hashes"] = str(getattr(config.cache_config, "prefix_caching_hash_algo", ""))
    short = name.rstrip("/").rsplit("/", 2)[-2:]
    return "/".join(short)[-NAME_CHARACTERS_MAX:], digest_of(facts)


def adapter_name(lora: LoraRequest | None) -> str:
    """What separates the chunks of a LoRA adapter: its name, its place and its weights; empty without one."""
    if lora is None:
        return ""
    path = str(getattr(lora, "lora_path", ""))
    return digest_of({"name": lora.lora_name, "path": path, "weights": directory_digest(Path(path))})


def _weights_of(config: EngineConfig, name: str) -> str:
    load_format = str(getattr(getattr(config, "load_config", None), "load_format", ""))
    if load_format.endswith("dummy"):
        return f"dummy {getattr(config.model_config, 'seed', None)}"
    path = Path(name)
    if path.exists():
        digest = directory_digest(path)
        if not digest:
            raise LayoutMismatch(f"no weights in {name!r} tell one version of the model from another")
        return digest
    revision = getattr(config.model_config, "revision", None)
    # What vLLM has resolved carries the commit beside the name that was asked for.
    commit = getattr(revision, "commit_hash", None) or revision
    if not commit:
        raise LayoutMismatch(f"nothing says which version of {name!r} is served, expected a revision")
    return str(commit)


def _configuration_of(hf_config: object) -> str:
    if hf_config is None:
        return ""
    as_dict = getattr(hf_config, "to_dict", None)
    values = as_dict() if callable(as_dict) else vars(hf_config)
    kept = {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(kept, sort_keys=True, default=str)
