"""Settings of the TensorRT-LLM connector, from the environment and the engine's own arguments.

The connector's configuration in TensorRT-LLM has no room for options, and of the environment only names that begin with
TLLM or TRTLLM reach the processes of the ranks: hence TLLM_KVPOOL_…. Read once, checked whole; the files of the weights are
read in the background (`engines/weights`). Any thread.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvpool.errors import LayoutMismatch
from kvpool.socket_path import find_socket
from kvpool_client.engines.settings import integer, read_settings, seconds
from kvpool_client.engines.weights import READING, Revision, weights_of
from kvpool_client.engines.weights_reading import WeightsReader

PREFIX = "TLLM_KVPOOL_"
_OWN = {
    "claim_timeout_s": seconds(),
    "staging_mib": integer(1, 1 << 20),
    "window_mib": integer(1, 1 << 20),
    "retention_s": seconds(most=4_000_000),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """`refusal`: why nothing is shared with this engine; empty where it is. `later`: what names the weights when their files
    were read, until when that is the refusal; None where the revision is known.

    `timeout_s` bounds a round trip, and `claim_timeout_s` how long the executor waits for all lookups of one iteration
    together while requests run; its default is a guess, a part of a step in which they are decoded. `staging_bytes` is the
    memory in which claimed chunks wait for their ranks, `window_bytes` that of each rank in which blocks of windows wait to be
    stored. `has_scratch_pages`: the engine may share pages between such blocks. `retention_s`: how long after its last use a
    chunk retains the engine's priority, whose own duration the engine does not pass on. `ranks` share a prompt's KV: under
    attention data parallelism every owner has a scheduler and all of its prompts' KV, and is one rank of one.
    """

    model: str
    tokens_per_block: int
    ranks: int
    format: str
    socket: str = field(default_factory=find_socket)
    revision: str = ""
    salt: str = ""
    timeout_s: float = 0.5
    claim_timeout_s: float = 0.005
    staging_bytes: int = 1 << 30
    window_bytes: int = 1 << 30
    copy_threads: int = 2
    retention_s: float = 3600.0
    is_layerwise: bool = True
    is_attention_dp: bool = False
    has_scratch_pages: bool = False
    refusal: str = ""
    later: Revision | None = None

    @classmethod
    def read(cls, llm_args: Any, environment: Mapping[str, str], version: str) -> "Settings":
        """The settings of one engine. Raises ConfigError, naming every variable that is wrong."""
        variables = {key.removeprefix(PREFIX): text for key, text in environment.items() if key.startswith(PREFIX)}
        # Names of settings are those of variables in small letters, and a variable in small letters is none.
        given = {name.swapcase(): _value(name.swapcase(), text) for name, text in variables.items()}
        values = read_settings(cls, given, _OWN, spelled=lambda name: PREFIX + name.swapcase())
        for size in ("staging", "window"):
            if f"{size}_mib" in values:
                values[f"{size}_bytes"] = values.pop(f"{size}_mib") << 20
        model = values.pop("model", "") or str(llm_args.model)
        revision, unknown = _revision(llm_args, values.pop("revision", ""), environment)
        refusal = _refusal(llm_args) or unknown
        is_attention_dp = bool(getattr(llm_args, "enable_attention_dp", False))
        backend = getattr(llm_args, "attn_backend", "")
        is_eager = (
            getattr(llm_args, "cuda_graph_config", None) is None
            and getattr(llm_args, "torch_compile_config", None) is None
        )
        settings = cls(
            model=model,
            tokens_per_block=int(llm_args.kv_cache_config.tokens_per_block),
            ranks=1 if is_attention_dp else int(getattr(llm_args, "tensor_parallel_size", 1)),
            format=f"trtllm-1 {version} {backend}",
            is_layerwise=is_eager,
            is_attention_dp=is_attention_dp,
            has_scratch_pages=bool(getattr(llm_args.kv_cache_config, "enable_swa_scratch_reuse", False)),
            refusal=refusal or READING,
            later=None if refusal else revision,
            **values,
        )
        return settings.named()

    def begun(self, reader: WeightsReader) -> "Settings":
        """`named`, after the files of the weights have begun to be read; small and remembered ones have been then."""
        if self.later is not None:
            self.later.begin_reading(reader)
        return self.named()

    def named(self) -> "Settings":
        """These settings, with the revision where it is known by now, or a refusal where the weights have none."""
        if self.later is None:
            return self
        try:
            revision = self.later.find()
        except LayoutMismatch as error:
            return replace(self, refusal=_unidentified(error), later=None)
        return self if revision is None else replace(self, revision=revision, refusal="", later=None)


def _value(name: str, text: str) -> str | int | float:
    """What a variable's text stands for."""
    if name.endswith(("_s", "_mib", "_threads")):
        with suppress(ValueError):  # the text is none
            number = float(text)
            return int(number) if number.is_integer() else number
    return text


def _revision(llm_args: Any, given: str, environment: Mapping[str, str]) -> tuple[Revision | None, str]:
    """What names the weights and everything else that changes their KV; or, where the weights cannot be identified, why nothing
    is shared.

    `given`: the operator's name for the weights.
    """
    name, asked = str(llm_args.model), str(getattr(llm_args, "revision", None) or "")
    try:
        weights = given or weights_of(name, asked, environment)
    except (LayoutMismatch, OSError) as error:
        return None, _unidentified(error)
    cache = llm_args.kv_cache_config
    facts = {field: str(getattr(llm_args, field, None)) for field in _MODEL_FIELDS}
    return Revision({"kv_dtype": str(getattr(cache, "dtype", "auto")), **facts}, weights=weights), ""


def _unidentified(error: Exception) -> str:
    return f"{error}: set {PREFIX}REVISION to a name that changes whenever the weights do"


# The engine's arguments that change KV without changing weights or shapes.
_MODEL_FIELDS = ("dtype", "quant_config", "model_kwargs")


def _refusal(llm_args: Any) -> str:
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if int(getattr(llm_args, name, None) or 1) > 1:
            instead = "set tensor_parallel_size instead"
            return f"{name} is {getattr(llm_args, name)}, expected 1: {instead}, or run without the connector"
    if getattr(llm_args, "speculative_config", None) is not None:
        return "speculative_config is set and draft KV is not stored: remove it, or run without the connector"
    if str(getattr(llm_args.kv_cache_config, "dtype", "auto")) in ("int8", "nvfp4"):
        dtype = llm_args.kv_cache_config.dtype
        return f"kv_cache_config.dtype is {dtype}, whose scales are beside the KV: set it to auto or fp8"
    return ""
