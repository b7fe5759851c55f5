"""Engine pages: the KV that TensorRT-LLM registers, as one array for each layer, and the geometry that all ranks must have.

Its first cache manager registers one pool tensor [blocks, layers, K and V, …]. The second describes pages: regions of bytes
that repeat once for each page slot, in layer groups with an index space each, of full attention or with a window. A group is
in one region or in several of one stride: a page is opaque bytes. Where the region of the only group is the model's layers in
order, so are the arrays, and layers are loaded and saved one by one; else only whole steps are.

Pure but for reading the engine's objects; keeps no memory alive but through the arrays. Any thread.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool.layout import LAYERS_MAX
from kvpool.layouts.groups import WINDOW_MAX
from kvpool_client.trtllm.geometry import GroupGeometry

SCALED_ELSEWHERE = ("int8",)
_KEY, _VALUE = "key", "value"
_DIGEST_HEX = 32


@dataclass(frozen=True, slots=True)
class EnginePages:
    """One rank's KV of a layer group. `is_by_layer`: the arrays are the group's layers, in the order in which the forward runs
    them."""

    geometry: GroupGeometry
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
    geometry = GroupGeometry(
        shape[1], shape[2], token_bytes, tokens_per_block, f"{words} {dtype} {inner}", is_replicated=shape[2] == 1
    )
    return EnginePages(geometry, tuple(tensor[:, layer] for layer in range(shape[1])))


def pages_of_layout(
    layout: Any, tokens_per_block: int, words: str, *, has_scratch_pages: bool = False
) -> tuple[EnginePages, ...]:
    """The pages of each layer group of the second manager's KvCacheLayout. Raises LayoutMismatch for what cannot be served.

    `has_scratch_pages`: blocks that a window passes within a step may share pages.
    """
    groups = list(layout.groups)
    if [int(group.layer_group_id) for group in groups] != list(range(max(1, len(groups)))):
        raise LayoutMismatch(
            f"the KV cache has {len(groups)} layer groups, expected one or more, with numbers from 0 on: run without the "
            "connector"
        )
    if has_scratch_pages and any(group.window_size is not None for group in groups):
        raise LayoutMismatch(
            "blocks share scratch pages in layer groups with a window, expected a page for each: set "
            "kv_cache_config.enable_swa_scratch_reuse to False, or run without the connector"
        )
    if int(layout.tokens_per_block) != tokens_per_block:
        raise LayoutMismatch(
            f"pages are of {layout.tokens_per_block} tokens and kv_cache_config.tokens_per_block is {tokens_per_block}, "
            "expected one number: set tokens_per_block to the pages' size"
        )
    dtype = str(getattr(layout, "dtype", "")).removeprefix("torch.")
    _check_dtype(dtype)
    return tuple(_pages_of_group(group, tokens_per_block, f"{words} pages", dtype) for group in groups)


def _pages_of_group(group: Any, tokens_per_block: int, words: str, dtype: str) -> EnginePages:
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
    if not any(_KEY in str(buffer.role) for buffer in buffers):
        roles = ", ".join(sorted({str(buffer.role) for buffer in buffers}))
        raise LayoutMismatch(
            f"layer group {group.layer_group_id} has pages of {roles}, expected keys: recurrent states are not served, run "
            "without the connector"
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
    geometry = GroupGeometry(
        count,
        max(1, planes),
        token_bytes,
        tokens_per_block,
        f"{words} {_digest_of(regions)} {dtype}".rstrip(),
        is_replicated=not any(_VALUE in str(buffer.role) for buffer in buffers),
        window=_window_of(group),
    )
    arrays = [part for region in regions for part in _parts(region.as_tensor(), int(region.size), part_bytes)]
    return EnginePages(geometry, tuple(arrays), is_by_layer=planes > 0)


def _window_of(group: Any) -> int:
    """Tokens of a group's window, 0 where it attends to all. Raises LayoutMismatch."""
    if group.window_size is None:
        return 0
    if not 1 <= int(group.window_size) <= WINDOW_MAX:
        raise LayoutMismatch(
            f"layer group {group.layer_group_id} has a window of {group.window_size} tokens, expected 1..{WINDOW_MAX}: "
            "run without the connector"
        )
    return int(group.window_size)


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
