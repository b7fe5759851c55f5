"""Settings of a KV cache as TensorRT-LLM gives them, turned into the geometry of a block pool.

Duck-typed: `KvCacheConfig` is any object with its fields, of which absent ones have TensorRT-LLM's defaults; a dtype is
torch's, its name, or a member of TensorRT-LLM's `DataType`. What a block pool does not do is refused by name. Pure, but for
the device's free memory. Any thread.
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch

from kvpool.errors import InvalidArgument
from kvpool.layout import ITEM_BYTES
from kvpool_blocks.block_memory import BlockShape, dtype_name

_DTYPES = {"half": "float16", "bf16": "bfloat16", "float": "float32", "fp8": "float8_e4m3fn"}
FREE_MEMORY_FRACTION = 0.9


class CacheType(enum.Enum):
    """The kinds of cache that TensorRT-LLM knows, as `KVCacheManager` takes them: SELF (K and V of self attention) alone."""

    SELF = "self"
    CROSS = "cross"
    SELFKONLY = "selfkonly"


def check_cache_type(kind: object) -> None:
    """Raises InvalidArgument for anything but SELF, of this enum or TensorRT-LLM's."""
    if getattr(kind, "name", None) != CacheType.SELF.name:
        raise InvalidArgument(f"kv_cache_type is {kind!r}, expected CacheType.SELF")


def layout_dtype(dtype: object) -> str:
    """The layout's name of a dtype. Raises InvalidArgument."""
    name = dtype_name(getattr(dtype, "name", dtype))
    name = _DTYPES.get(name.lower(), name.lower())
    if name not in ITEM_BYTES:
        raise InvalidArgument(f"dtype is {dtype!r}, expected one of {', '.join([*_DTYPES, *ITEM_BYTES])}")
    return name


def local_heads(num_kv_heads: int | Sequence[int | None], mapping: Any) -> int:
    """KV heads on this rank: those of all ranks over the tensor-parallel ones, rounded up. Raises InvalidArgument."""
    total = {num_kv_heads} if isinstance(num_kv_heads, int) else set(num_kv_heads)
    if len(total) != 1 or not isinstance(heads := total.pop(), int):
        raise InvalidArgument(f"num_kv_heads is {num_kv_heads!r}, expected the same number for every layer")
    ranks = 1 if getattr(mapping, "enable_attention_dp", False) else getattr(mapping, "tp_size", 1)
    return -(-heads // ranks)


def local_layers(num_layers: int, mapping: Any) -> list[int]:
    """The layers of this rank's pipeline stage, by their numbers in the model."""
    pp_layers = getattr(mapping, "pp_layers", None)
    return list(pp_layers(num_layers)) if pp_layers is not None else list(range(num_layers))


def check_counts(**counts: object) -> None:
    """Raises InvalidArgument for anything but numbers from 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidArgument(f"{name} is {value!r}, expected a number from 1")


def check_config(config: Any, max_seq_len: int) -> None:
    """Raises InvalidArgument for what a block pool does not do, naming the setting."""
    windows = getattr(config, "max_attention_window", None)
    if windows is not None and any(window < max_seq_len for window in windows):
        raise InvalidArgument(f"max_attention_window is {windows!r}, expected None or max_seq_len {max_seq_len}")
    if getattr(config, "sink_token_length", None):
        raise InvalidArgument(f"sink_token_length is {config.sink_token_length!r}, expected None")
    if not getattr(config, "enable_partial_reuse", True):
        raise InvalidArgument("enable_partial_reuse is False, expected True: heads of blocks are always reused")
    if getattr(config, "host_cache_size", None):
        raise InvalidArgument(
            f"host_cache_size is {config.host_cache_size!r}, expected None: host memory is the daemon's (`pool`)"
        )


def block_count(config: Any, shape: BlockShape, device: "torch.device") -> int:
    """How many blocks of this shape the settings allow: by `max_tokens`, and on a CUDA device by its free memory too.

    Raises InvalidArgument where neither says it, or where it is none.
    """
    max_tokens = getattr(config, "max_tokens", None)
    counts: list[int] = [] if max_tokens is None else [max_tokens // shape.tokens_per_block]
    fraction = getattr(config, "free_gpu_memory_fraction", None)
    if device.type == "cuda" and (fraction is not None or max_tokens is None):
        free_bytes, _ = torch.cuda.mem_get_info(device)
        counts.append(int(free_bytes * (FREE_MEMORY_FRACTION if fraction is None else fraction) // shape.block_bytes))
    if not counts:
        raise InvalidArgument(f"max_tokens is None, expected a number on the device {device}")
    if min(counts) < 1:
        raise InvalidArgument(f"max_tokens is {max_tokens!r}, room for {min(counts)} blocks, expected at least one")
    return min(counts)
