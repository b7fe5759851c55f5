"""The configuration of the TensorRT-LLM connector: the environment, and what the engine's own arguments say.

The connector's configuration in TensorRT-LLM has no room for options, and of the environment only names that begin with
TLLM or TRTLLM reach the processes of the ranks: hence TLLM_KVPOOL_…. Read once, checked whole. Pure; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import InvalidArgument

PREFIX = "TLLM_KVPOOL_"
SOCKET = "/run/kvpool/kvpool.sock"


@dataclass(frozen=True, slots=True)
class Settings:
    """`refusal` says why nothing is shared, if anything about the engine forbids it; empty otherwise.

    `timeout_s` bounds a round trip and `claim_timeout_s` all of one lookup, both on the executor's thread;
    `staging_bytes` is the memory in which claimed chunks wait for their ranks. `retention_s`: how long after its last use a
    chunk is kept with the engine's priority, whose own duration the engine does not tell.
    """

    model: str
    tokens_per_block: int
    ranks: int
    format: str
    socket: str = SOCKET
    revision: str = ""
    salt: str = ""
    timeout_s: float = 0.5
    claim_timeout_s: float = 1.0
    staging_bytes: int = 1 << 30
    copy_threads: int = 2
    retention_s: float = 3600.0
    is_layerwise: bool = True
    refusal: str = ""

    @classmethod
    def read(cls, llm_args: Any, environment: Mapping[str, str], version: str) -> "Settings":
        """The settings of one engine. Raises InvalidArgument, naming every variable that is wrong."""
        given = {key.removeprefix(PREFIX): value for key, value in environment.items() if key.startswith(PREFIX)}
        faults = [f"{PREFIX}{key} is no setting" for key in given if key not in {*_TEXTS, *_NUMBERS}]
        texts = {name: given[key] for key, name in _TEXTS.items() if key in given}
        numbers = {}
        for key, (name, least, most) in _NUMBERS.items():
            if key in given:
                numbers[name] = _number(given[key])
                if not least <= numbers[name] <= most:
                    faults.append(f"{PREFIX}{key} is {given[key]!r}, expected {least}..{most}")
        if faults:
            raise InvalidArgument("; ".join(faults))
        revision = texts.pop("revision", "") or str(getattr(llm_args, "revision", None) or "")
        model = texts.pop("model", "") or str(llm_args.model)
        backend = getattr(llm_args, "attn_backend", "")
        is_eager = (
            getattr(llm_args, "cuda_graph_config", None) is None
            and getattr(llm_args, "torch_compile_config", None) is None
        )
        return cls(
            model=model,
            revision=revision,
            tokens_per_block=int(llm_args.kv_cache_config.tokens_per_block),
            ranks=int(getattr(llm_args, "tensor_parallel_size", 1)),
            format=f"trtllm-1 {version} {backend}",
            timeout_s=numbers.get("timeout_s", 0.5),
            claim_timeout_s=numbers.get("claim_timeout_s", 1.0),
            staging_bytes=int(numbers.get("staging_mib", 1024)) << 20,
            copy_threads=int(numbers.get("copy_threads", 2)),
            retention_s=numbers.get("retention_s", 3600.0),
            is_layerwise=is_eager,
            refusal=_refusal(llm_args),
            **texts,
        )


_TEXTS = {"SOCKET": "socket", "SALT": "salt", "MODEL": "model", "REVISION": "revision"}
_NUMBERS = {
    "TIMEOUT_S": ("timeout_s", 0.001, 3600.0),
    "CLAIM_TIMEOUT_S": ("claim_timeout_s", 0.001, 3600.0),
    "STAGING_MIB": ("staging_mib", 1, 1 << 20),
    "COPY_THREADS": ("copy_threads", 1, 64),
    "RETENTION_S": ("retention_s", 0.001, 4_000_000.0),
}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _refusal(llm_args: Any) -> str:
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if int(getattr(llm_args, name, None) or 1) > 1:
            return f"{name} is {getattr(llm_args, name)}, expected 1"
    if getattr(llm_args, "enable_attention_dp", False):
        return "enable_attention_dp is set"
    if getattr(llm_args, "speculative_config", None) is not None:
        return "speculative_config is set: draft KV is not kept"
    return ""
