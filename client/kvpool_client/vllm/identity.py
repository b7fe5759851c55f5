"""Which model this is: the name and the revision under which its chunks are kept.

KV of equal tokens differs with the weights, so beside the model's own name stands a digest of its revision, its whole
configuration, and of the weights where they lie in a directory: sizes, headers and a sample of every tensor. Two random models
of one shape therefore never meet, nor do a model and its fine-tuned successor in the same place. What is not here: hardware,
block sizes and formats; these are the layout's.

Reads files once, at the engine's start. Any thread.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool_client.vllm.surface import EngineConfig, LoraRequest

NAME_CHARACTERS_MAX = 300
DIGEST_HEX = 32
SAMPLE_BYTES = 4096
SAMPLES_MAX = 4096
HEADER_BYTES_MAX = 100 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
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
    return "/".join(short)[-NAME_CHARACTERS_MAX:], _digest(facts)


def adapter_name(lora: LoraRequest | None) -> str:
    """What separates the chunks of a LoRA adapter: its name, its place and its weights; empty without one."""
    if lora is None:
        return ""
    path = str(getattr(lora, "lora_path", ""))
    return _digest({"name": lora.lora_name, "path": path, "weights": directory_digest(Path(path))})


def directory_digest(path: Path) -> str:
    """A digest of the weights in a directory (or of one file); empty where there are none."""
    files = sorted(entry for entry in _files_of(path) if entry.suffix in WEIGHT_SUFFIXES)
    if not files:
        return ""
    return _digest({entry.name: "".join(_file_facts(entry)) for entry in files})


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


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (entry for entry in path.iterdir() if entry.is_file())


def _file_facts(path: Path) -> Iterator[str]:
    """Size and samples: of a safetensors file its header and the middle of each tensor, of others evenly and by date."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        yield f"{size} "
        header = _header_of(file, size) if path.suffix == ".safetensors" else b""
        middles = _tensor_middles(header)
        if middles:
            yield _hex(header)
        else:
            yield f"{status.st_mtime_ns} "
            middles = list(range(0, size, max(SAMPLE_BYTES, size // SAMPLES_MAX)))
        for offset in middles:
            file.seek(offset)
            yield _hex(file.read(SAMPLE_BYTES))


def _header_of(file: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file, empty where it has none."""
    header_bytes = int.from_bytes(file.read(8), "little")
    return file.read(header_bytes) if 0 < header_bytes <= min(HEADER_BYTES_MAX, size) else b""


def _tensor_middles(header: bytes) -> list[int]:
    """Where to sample each tensor that the header names; empty where it is no header."""
    try:
        named = json.loads(header)
        spans = [entry["data_offsets"] for key, entry in sorted(named.items()) if key != "__metadata__"]
        begins = 8 + len(header)
        return [begins + max(first, (first + last - SAMPLE_BYTES) // 2) for first, last in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _digest(facts: Mapping[str, object]) -> str:
    return _hex(json.dumps(facts, sort_keys=True, default=str).encode())[:DIGEST_HEX]


def _hex(data: bytes) -> str:
    return kvpool_native.blake3(data).hex()
