"""vLLM's specs of its KV cache's layers, with the shape that the scripted engine has (see `engine.py`)."""

from dataclasses import dataclass
from typing import Any

from tests.rigs.vllm.request import BLOCK

LAYERS, HEADS, WIDTH = 3, 2, 8
TOKEN_BYTES = HEADS * WIDTH
STATE_PADDING = 8


def name_of_layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


NAMES = [name_of_layer(number) for number in range(LAYERS)]


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    page_size_bytes: int = BLOCK * TOKEN_BYTES
    num_kv_heads: int = HEADS
    head_size: int = WIDTH
    dtype: str = "torch.uint8"


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    """Layers that attend to the last tokens, this one included."""

    sliding_window: int = BLOCK


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Layers that attend to the tokens of the same piece of the prompt."""

    attention_chunk_size: int = BLOCK


@dataclass
class MambaSpec:
    """Layers with a recurrent state, a block for each, padded to the blocks of attention."""

    block_size: int = BLOCK
    page_size_bytes: int = BLOCK * TOKEN_BYTES
    shapes: tuple[tuple[int, ...], ...] = ((BLOCK * TOKEN_BYTES - STATE_PADDING,),)
    dtypes: tuple[str, ...] = ("torch.uint8",)
    mamba_type: str = "gdn_attention"
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    tp_replicated: bool = False


@dataclass
class UniformTypeKVCacheSpecs:
    """A spec for each layer, as vLLM shows them to workers alone."""

    kv_cache_specs: dict[str, FullAttentionSpec]
    block_size: int = BLOCK

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


def specs_by_layer(**odd_layer: Any) -> UniformTypeKVCacheSpecs:
    """A spec for each layer, equal but for the last one's `odd_layer`."""
    last = FullAttentionSpec(**odd_layer)
    return UniformTypeKVCacheSpecs({name: FullAttentionSpec() for name in NAMES[:-1]} | {NAMES[-1]: last})
