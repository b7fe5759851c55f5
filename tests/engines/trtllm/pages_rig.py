"""KVCacheManagerV2's description of its pages, for tests without TensorRT-LLM: regions, layer groups, the layout.

Written after `connectors/kv_cache_layout.py` of TensorRT-LLM main: a page slot's bytes lie at base + stride * slot; buffers are
layer-major, while a group names its layers in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Buffer:
    """KvCacheBufferRef."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class Region:
    """KvCacheRegion, over a tensor instead of an address."""

    rows: Any
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        return int(self.rows.shape[1])

    @property
    def stride(self) -> int:
        return int(self.rows.stride(0))

    @property
    def num_slots(self) -> int:
        return int(self.rows.shape[0])

    def as_tensor(self, dtype: Any = torch.uint8) -> Any:
        return self.rows.view(dtype)


@dataclass(frozen=True)
class Group:
    """KvCacheLayerGroupLayout."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[Region, ...]
    replicated_regions: tuple[Region, ...] = ()


@dataclass(frozen=True)
class PageLayout:
    """KvCacheLayout."""

    tokens_per_block: int
    groups: tuple[Group, ...]


def roles_of(planes: int) -> list[str]:
    """K and V, or the latent KV alone."""
    return ["key", "value"][:planes]


def regions_apart(tensor: Any) -> list[Region]:
    """A tensor [blocks, layers, planes, …] over memory [blocks, planes, layers, …]: a region for K and one for V."""
    layers, planes = int(tensor.shape[1]), int(tensor.shape[2])
    whole = tensor.permute(0, 2, 1, 3).view(torch.uint8)
    assert whole.is_contiguous()
    rows = whole.reshape(tensor.shape[0], planes, -1)
    return [
        Region(rows[:, plane], tuple(Buffer(layer, role) for layer in range(layers)))
        for plane, role in enumerate(roles_of(planes))
    ]


def group_region(tensor: Any, layers: Sequence[int]) -> Region:
    """A layer group's pool tensor [blocks, layers, planes, …] as one region: K and V of these layers of the model, in order."""
    roles = roles_of(int(tensor.shape[2]))
    buffers = tuple(Buffer(layer, role) for layer in layers for role in roles)
    return Region(tensor.view(torch.uint8).reshape(tensor.shape[0], -1), buffers)
