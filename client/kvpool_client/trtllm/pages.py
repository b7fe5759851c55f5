"""Engine pages: the KV that TensorRT-LLM registers, as one array for each layer, and the geometry that all ranks must have.

Its first cache manager registers one pool tensor [blocks, layers, K and V, …]. The second describes pages: regions of bytes
that repeat once for each page slot, in layer groups with an index space each. One group of full attention is served, in one
region or in several of one stride: a page is opaque bytes. Where the region is the model's layers in order, so are the arrays,
and layers are loaded and saved one by one; else only whole steps are.

Pure but for reading the engine's objects; keeps no memory alive but through the arrays. Any thread.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool.layout import LAYERS_MAX
from kvpool_client.trtllm.plan import Geometry

SCALED_ELSEWHERE = ("int8",)
_VALUE = "value"
_DIGEST_HEX = 32


@dataclass(frozen=True, slots=True)
class EnginePages:
    """One rank's KV. `is_by_layer`: the arrays are the model's layers, in the order in which the forward runs them."""

    geometry: Geometry
    layers: tuple[Any, ...]
    is_by_layer: bool = True


def pages_of_tensor(tensor: Any, tokens_per_block: int, words: str) -> EnginePages:
    """The pages of the first manager's pool tensor. Raises LayoutMismatch."""
    shape = tuple(int(size) for size in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if len(shape) < 4 or shape[2] not in (1, 2):
        raise LayoutMismatch(
            f"the KV pool has shape {shape}, expected [blocks, layers, 1 or 2, …]: "
            "run this version of TensorRT-LLM without the connector"
        )
    _check_dtype("int8" if dtype == "uint8" else dtype)
    plane_bytes = int(tensor.element_size())
    for size in shape[3:]:
        plane_bytes *= size
    token_bytes = _per_token(plane_bytes, tokens_per_block, "a block's plane")
    inner = "x".join(str(size) for size in shape[3:])
    geometry = Geometry(
        shape[1], shape[2], token_bytes, tokens_per_block, f"{words} {dtype} {inner}", is_replicated=shape[2] == 1
    )
    return EnginePages(geometry, tuple(tensor[:, layer] for layer in range(shape[1])))


def pages_of_layout(layout: Any, tokens_per_block: int, words: str) -> EnginePages:
    """The pages of the second manager's KvCacheLayout. Raises LayoutMismatch for what cannot be served."""
    group = _only_group(layout)
    if int(layout.tokens_per_block) != tokens_per_block:
        raise LayoutMismatch(
            f"pages are of {layout.tokens_per_block} tokens and kv_cache_config.tokens_per_block is {tokens_per_block}, "
            "expected one number: set tokens_per_block to the pages' size"
        )
    _check_dtype(str(getattr(layout, "dtype", "")).removeprefix("torch."))
    regions = [*group.regions, *getattr(group, "replicated_regions", ())]
    buffers = [buffer for region in regions for buffer in region.buffers]
    if not buffers or any(int(getattr(buffer, "expansion", 1)) != 1 for buffer in buffers):
        raise LayoutMismatch(
            f"{len(regions)} regions with layers of different page sizes, expected one page size for all layers: "
            "run this model without the connector"
        )
    if len({(int(region.stride), int(region.num_slots)) for region in regions}) > 1:
        raise LayoutMismatch(
            f"{len(regions)} regions repeat at different strides, expected one pool of pages (a quantized KV has its scales in "
            "another): set kv_cache_config.dtype to auto, or run without the connector"
        )
    planes = _planes_by_layer(regions)
    sizes = [int(region.size) for region in regions]
    part_bytes = sizes[0] * planes // len(buffers) if planes else gcd(*sizes)
    count = sum(sizes) // part_bytes
    if count > LAYERS_MAX:
        raise LayoutMismatch(
            f"regions of {sizes} bytes are {count} equal parts, expected at most {LAYERS_MAX}: run without the connector"
        )
    token_bytes = _per_token(part_bytes // max(1, planes), tokens_per_block, "a part of a page")
    geometry = Geometry(
        count,
        max(1, planes),
        token_bytes,
        tokens_per_block,
        f"{words} pages {_digest_of(regions)} {str(getattr(layout, 'dtype', '')).removeprefix('torch.')}".rstrip(),
        is_replicated=not any(_VALUE in str(buffer.role) for buffer in buffers),
    )
    arrays = [part for region in regions for part in _parts(region.as_tensor(), int(region.size), part_bytes)]
    return EnginePages(geometry, tuple(arrays), is_by_layer=planes > 0)


def _only_group(layout: Any) -> Any:
    groups = list(layout.groups)
    windows = sorted({str(group.window_size or "full") for group in groups})
    if len(groups) != 1 or groups[0].window_size is not None:
        raise LayoutMismatch(
            f"the KV cache has {len(groups)} layer groups with attention windows of {', '.join(windows) or 'nothing'}, "
            "expected one group of full attention: set kv_cache_config.max_attention_window to max_seq_len where the model "
            "allows it (more GPU memory for each token), or run without the connector"
        )
    return groups[0]


def _check_dtype(dtype: str) -> None:
    if dtype in SCALED_ELSEWHERE:
        raise LayoutMismatch(
            f"the KV pool is of {dtype}: its scales are stored elsewhere and would be lost: "
            "set kv_cache_config.dtype to auto, bfloat16, float16 or fp8"
        )


def _per_token(size: int, tokens_per_block: int, what: str) -> int:
    if size % tokens_per_block:
        raise LayoutMismatch(
            f"{what} of {size} bytes does not hold {tokens_per_block} tokens, expected a multiple: "
            "set kv_cache_config.tokens_per_block to 32 or 64"
        )
    return size // tokens_per_block


def _planes_by_layer(regions: list[Any]) -> int:
    """How many equal buffers each layer has, where one region holds the model's layers in order; 0 where none does so."""
    if len(regions) != 1:
        return 0
    layers = [int(buffer.layer_id) for buffer in regions[0].buffers]
    count = len(set(layers))
    planes = len(layers) // count
    is_in_order = layers == [layer for layer in sorted(set(layers)) for _ in range(planes)]
    is_even = planes in (1, 2) and planes * count == len(layers) and int(regions[0].size) % len(layers) == 0
    return planes if is_in_order and is_even else 0


def _parts(rows: Any, row_bytes: int, part_bytes: int) -> list[Any]:
    """A region's rows [slots, bytes] cut into parts of one size."""
    return [rows[:, start : start + part_bytes] for start in range(0, row_bytes, part_bytes)]


def _digest_of(regions: list[Any]) -> str:
    """Digest of the layout of a page."""
    words = [
        f"{int(region.size)}:" + ",".join(f"{int(buffer.layer_id)}.{buffer.role}" for buffer in region.buffers)
        for region in regions
    ]
    return kvpool_native.blake3("|".join(words).encode()).hex()[:_DIGEST_HEX]
