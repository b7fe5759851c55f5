"""Geometry of vLLM's KV: one Layout for all shards, and the registered tensors as blocks of bytes.

Blocks are opaque: vLLM's backends order and pack what is inside as they like (the CPU backend by instruction set), so the
format's name carries everything that may change the order, and chunks are shared only where all of it is equal. Scheduler
and workers compute the same Layout from the same configuration; a worker then compares it with the tensors it is given.

Raises LayoutMismatch for KV that kvpool cannot store; the caller runs without a pool. Pure but for reading tensors' attributes;
any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import kvpool_native
from kvpool.layout import Layout
from kvpool.layouts.groups import STATE, Group
from kvpool_client.vllm.identity.parts import STATE_FACTS, KindOfLayers, Part, difference, kinds_of
from kvpool_client.vllm.identity.placement import check_placement
from kvpool_client.vllm.identity.ranks import Ranks, heads_of_model, stage_layers
from kvpool_client.vllm.identity.stages import stages_of
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import CacheConfig, CacheSpec, EngineConfig

AXIS_MAX = 65536
# Of the digest of a group's layer names.
DIGEST_HEX = 16
# The name of an engine's order of bytes in blocks of a spec, or of so many heads of it, beyond the configuration.
FormOf = Callable[[CacheSpec, int | None], str]
# The number of a layer's part, and its own number there.
LayerPlace = tuple[int, int]


class Tensor(Protocol):
    """The part of a torch tensor that describes its memory; `as_strided` makes a view and copies nothing."""

    shape: Sequence[int]

    def stride(self) -> Sequence[int]:
        """Steps of each dimension, in items."""
        ...

    def element_size(self) -> int:
        """Bytes of an item."""
        ...

    def storage_offset(self) -> int:
        """Where the view begins in its storage, in items."""
        ...

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int) -> "Tensor":
        """A view of the same storage."""
        ...


@dataclass(frozen=True, slots=True)
class Geometry:
    """Mapping of an engine's KV to chunks.

    `layout`: of a scheduler, standing for all shards of all pipeline stages; with groups where there are several parts, or
    one that does not need every chunk. `parts`: this process's stage's, in the order of the layout's groups. `tables`: how many
    block tables a request has. `hash_tokens`: tokens behind each of the engine's block hashes.
    """

    layout: Layout
    parts: tuple[Part, ...]
    tables: int
    blocks: int
    hash_tokens: int
    ranks: Ranks

    @property
    def has_groups(self) -> bool:
        """Whether the layout has groups."""
        return bool(self.layout.groups)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.layout.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk in the middle of a prompt has: of the parts that need every chunk, or of all where none does."""
        counted = [part for part in self.parts if part.is_full] or self.parts
        return sum(len(part.layer_names) * part.block_bytes * self.blocks_of(part) for part in counted)

    @property
    def event_part(self) -> Part:
        """The part whose chunks are in events: the first one that needs every chunk, if any does."""
        return next((part for part in self.parts if part.is_full), self.parts[0])

    def blocks_of(self, part: Part) -> int:
        """Blocks that a chunk has in a part."""
        return 1 if part.is_state else self.layout.chunk_tokens // part.block_tokens

    def places_of(self, part: Part, chunk: int) -> range:
        """Where a chunk's blocks are in a part's block table: of a state the last one of its tokens alone."""
        end = (chunk + 1) * (self.layout.chunk_tokens // part.block_tokens)
        return range(end - self.blocks_of(part), end)

    @property
    def layer_places(self) -> dict[str, LayerPlace]:
        """Where each layer is: its part, and its number there."""
        return {
            name: (number, layer)
            for number, part in enumerate(self.parts)
            for layer, name in enumerate(part.layer_names)
        }

    def shard(self, rank: int) -> Layout:
        """The layout of one worker's rank."""
        return self.layout.for_rank(self.ranks.shard_of(rank))


def geometry_of(
    config: EngineConfig, caches: CacheConfig, chunk_tokens: int, form_of: FormOf, *, head_groups: int = 0
) -> Geometry:
    """The geometry of an engine. `head_groups`: of a joint engine's chunks; 0: its ranks have chunks apart. Raises Unserved."""
    parallel = config.parallel_config
    check_placement(parallel)
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unserved(
            "calculated_scales", "KV scales are calculated while serving, expected scales that are part of the model"
        )
    kinds = kinds_of(caches)
    parts = tuple(kind.part(chunk_tokens) for kind in kinds)
    _check_parts(config, kinds)
    _check_state_bytes(parts, chunk_tokens)
    hash_tokens = getattr(caches, "hash_block_size", None) or min(part.block_tokens for part in parts)
    if chunk_tokens % hash_tokens:
        raise Unserved(
            "coarse_hashes",
            f"block hashes cover {hash_tokens} tokens, expected a divisor of the chunk's {chunk_tokens}",
        )
    stages = stages_of(config, [name for kind in kinds for name in kind.layer_names])
    has_groups = len(parts) > 1 or not parts[0].is_full
    if stages and (has_groups or kinds[0].spec is not caches.kv_cache_groups[0].kv_cache_spec):
        # A stage with equal layers may still differ from other stages, which no process can see.
        raise Unserved("staged_groups", "layers have blocks of several kinds in an engine of several stages")
    replicas = _replicas(caches, kinds, parallel.tensor_parallel_size)
    is_joint = bool(head_groups) and all(kind.is_divided_by_heads for kind in kinds)
    ranks = Ranks(parallel.tensor_parallel_size, replicas, stages, is_joint)
    shapes = [
        _joint_shape(config, caches, kind, ranks, head_groups=head_groups, form_of=form_of)
        if is_joint
        else _shape_of(config, caches, kind, form_of)
        for kind in kinds
    ]
    if has_groups:
        groups = tuple(_group_of(kind, shape) for kind, shape in zip(kinds, shapes, strict=True))
        layout = Layout(groups=groups, chunk_tokens=chunk_tokens, rank=None, world=ranks.shards)
    else:
        own = len(parts[0].layer_names)
        layout = Layout(
            layers=stage_layers(stages, own) if is_joint else max(stages, default=own),
            chunk_tokens=chunk_tokens,
            rank=None,
            world=ranks.shards,
            stages=() if is_joint else stages,
            **shapes[0],
        )
    return Geometry(layout, parts, len(caches.kv_cache_groups), caches.num_blocks, hash_tokens, ranks)


def _check_parts(config: EngineConfig, kinds: Sequence[KindOfLayers]) -> None:
    """Raises Unserved where an engine has no part, or one that it must not load, or whose blocks the scheduler does not
    see."""
    if not kinds:
        raise Unserved("other_attention", "the model has no KV cache, expected one of attention")
    for first, other in pairwise(kinds):
        if first.table == other.table and not first.is_seen:
            raise Unserved("odd_blocks", difference(first, other))
    is_latent = any(type(kind.spec).__name__ == "MLAAttentionSpec" for kind in kinds)
    if is_latent and _computes_prefixes_anew(config):
        raise Unserved(
            "mla_without_prefixes",
            "the engine computes MLA without prefix caching on this processor, and would attend wrongly to a prefix that is "
            "loaded",
        )


def _check_state_bytes(parts: Sequence[Part], chunk_tokens: int) -> None:
    """Raises Unserved where a state's bytes are no bytes for each token of a chunk, as the layout counts them."""
    for part in parts:
        if part.is_state and part.block_bytes % chunk_tokens:
            raise Unserved(
                "odd_blocks",
                f"a state has {part.block_bytes} bytes, expected a multiple of the chunk's {chunk_tokens} tokens",
                remedy=f"set kvpool.chunk_tokens to {part.block_tokens}, or another multiple of it that divides the state",
            )


def _joint_shape(
    config: EngineConfig,
    caches: CacheConfig,
    kind: KindOfLayers,
    ranks: Ranks,
    *,
    head_groups: int,
    form_of: FormOf,
) -> dict[str, Any]:
    """The geometry of a part's chunks of which each rank has some heads: the model's, whatever the engine's sizes are."""
    spec = kind.spec
    heads = int(getattr(spec, "num_kv_heads", 1))
    total = heads_of_model(heads, ranks, head_groups)
    head_bytes, rest = divmod(spec.page_size_bytes, spec.block_size * heads)
    if rest:
        raise Unserved(
            "uneven_heads",
            f"a block of {heads} heads has {spec.page_size_bytes} bytes, expected whole bytes per token and head",
        )
    return {
        "kv_heads": total,
        "head_dim": head_bytes,
        "dtype": "uint8",
        "planes": 1,
        "format": _format(config, caches, spec, form_of(spec, 1), heads=total),
        "block_tokens": spec.block_size,
        "head_groups": head_groups,
    }


def _group_of(kind: KindOfLayers, shape: dict[str, Any]) -> Group:
    """A group of the layout. Its format names its layers: releases of vLLM divide a model's layers of one kind differently,
    into groups of the same shape."""
    layers = kvpool_native.blake3("\n".join(kind.layer_names).encode()).hex()[:DIGEST_HEX]
    named = shape | {"format": f"{shape['format']}/layers-{layers}"}
    return Group(kind=kind.kind, window=kind.window, layers=len(kind.layer_names), **named)


def _shape_of(config: EngineConfig, caches: CacheConfig, kind: KindOfLayers, form_of: FormOf) -> dict[str, Any]:
    """The geometry of a part's chunks: opaque blocks, of which one is a state."""
    spec = kind.spec
    if kind.kind == STATE:
        facts = "/".join(str(getattr(spec, name, None)) for name in STATE_FACTS)
        digest = kvpool_native.blake3(facts.encode()).hex()[:DIGEST_HEX]
        return {"state_bytes": kind.block_bytes, "format": f"vllm/{form_of(spec, None)}/state-{digest}"}
    heads, width = _token_shape(kind.block_bytes, spec.block_size)
    return {
        "kv_heads": heads,
        "head_dim": width,
        "dtype": "uint8",
        "planes": 1,
        "format": _format(config, caches, spec, form_of(spec, None)),
        "block_tokens": spec.block_size,
    }


def block_views(geometry: Geometry, part: Part, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Each layer's tensor as [blocks, items of a block in the order of memory]. Raises LayoutMismatch on another shape."""
    missing = [name for name in part.layer_names if name not in tensors]
    if missing:
        raise Unserved("odd_blocks", f"layer {missing[0]!r} was not registered, expected all {len(part.layer_names)}")
    if geometry.ranks.is_joint:
        return [_heads_view(name, tensors[name], geometry.blocks, part.block_bytes) for name in part.layer_names]
    view = _state_view if part.is_state else _block_view
    return [view(name, tensors[name], geometry.blocks, part.block_bytes) for name in part.layer_names]


def _heads_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """A layer's tensor as [blocks, heads, items of a head]: each head's bytes in a row, inside a block one behind the other."""
    shape, steps = [int(size) for size in tensor.shape], [int(step) for step in tensor.stride()]
    item, heads = tensor.element_size(), shape[1] if len(shape) > 1 else 0
    dense = 1
    for size, step in sorted(zip(shape[2:], steps[2:], strict=True), key=lambda axis: (axis[1], axis[0])):
        if size > 1 and step != dense:
            dense = 0
        dense *= size
    if not dense or shape[0] != blocks or heads * dense * item != block_bytes or (heads > 1 and steps[1] != dense):
        raise Unserved(
            "token_major",
            f"layer {name!r} has shape {tuple(shape)} and strides {steps}, expected [{blocks} blocks, heads, …] with each "
            f"head's bytes in a row and {block_bytes} bytes in a block",
        )
    return tensor.as_strided((blocks, heads, dense), (steps[0], dense, 1), tensor.storage_offset())


def _block_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """Dimension 0 counts blocks (or their equal parts, where the backend's blocks are smaller); inside there are no gaps."""
    item = tensor.element_size()
    rows, inner = int(tensor.shape[0]), [int(size) for size in tensor.shape[1:]]
    steps = [int(step) for step in tensor.stride()]
    parts, rest = divmod(rows, blocks)
    dense = 1
    for size, step in sorted(zip(inner, steps[1:], strict=True), key=lambda axis: (axis[1], axis[0])):
        if size > 1 and step != dense:
            raise Unserved("odd_blocks", f"layer {name!r} has strides {steps}, expected blocks without gaps")
        dense *= size
    if rest or not parts or parts * dense * item != block_bytes:
        raise Unserved(
            "odd_blocks",
            f"layer {name!r} has shape {tuple(tensor.shape)} of {item}-byte items, expected {blocks} blocks of "
            f"{block_bytes} bytes",
        )
    if parts > 1 and steps[0] != dense:
        raise Unserved(
            "odd_blocks", f"layer {name!r} has strides {steps}, expected the parts of a block one behind the other"
        )
    block_items = parts * dense
    return tensor.as_strided((blocks, block_items), (steps[0] * parts, 1), tensor.storage_offset())


def _state_view(name: str, tensor: Tensor, blocks: int, block_bytes: int) -> Tensor:
    """States as whole blocks: vLLM shows a state's own bytes, and the rest of its block is no other layer's."""
    item, steps = tensor.element_size(), [int(step) for step in tensor.stride()]
    inner = 1
    for size in tensor.shape[1:]:
        inner *= int(size)
    if item != 1 or int(tensor.shape[0]) != blocks or not inner <= block_bytes <= steps[0] or steps[-1] != 1:
        raise Unserved(
            "odd_blocks",
            f"layer {name!r} has shape {tuple(tensor.shape)} of {item}-byte items and strides {steps}, expected {blocks} "
            f"blocks of {block_bytes} bytes with a state in each",
        )
    return tensor.as_strided((blocks, block_bytes), (steps[0], 1), tensor.storage_offset())


def _replicas(caches: CacheConfig, kinds: Sequence[KindOfLayers], tensor_ranks: int) -> int:
    known = getattr(caches, "kv_tp_replicas", None)
    are_latent = all("MLA" in type(kind.spec).__name__ for kind in kinds)
    replicas = int(known) if known else (tensor_ranks if are_latent else 1)
    if tensor_ranks % replicas:
        raise Unserved("odd_blocks", f"{replicas} of {tensor_ranks} ranks hold the same KV, expected a divisor")
    return replicas


def _computes_prefixes_anew(config: EngineConfig) -> bool:
    """vLLM's reference backend of MLA on a CPU: the platform turns chunked prefill and prefix caching off for it."""
    device = getattr(getattr(config, "device_config", None), "device_type", None)
    chunked = getattr(getattr(config, "scheduler_config", None), "enable_chunked_prefill", True)
    return device == "cpu" and not chunked


def _token_shape(block_bytes: int, block_tokens: int) -> tuple[int, int]:
    """Two factors of a token's bytes, because neither field of a Layout may be larger than AXIS_MAX."""
    width, rest = divmod(block_bytes, block_tokens)
    if rest:
        raise Unserved(
            "odd_blocks", f"a block of {block_tokens} tokens has {block_bytes} bytes, expected whole bytes per token"
        )
    heads = 1
    while width > AXIS_MAX:
        if width % 2:
            raise Unserved("odd_blocks", f"a token has {heads * width} bytes in a layer, expected at most {AXIS_MAX}")
        heads, width = heads * 2, width // 2
    return heads, width


def _format(config: EngineConfig, caches: CacheConfig, spec: CacheSpec, form: str, *, heads: int | None = None) -> str:
    facts = (
        form,
        type(spec).__name__.removesuffix("Spec"),
        getattr(caches, "kv_cache_layout", None),
        getattr(spec, "dtype", None),
        getattr(config.cache_config, "cache_dtype", None),
        getattr(spec, "num_kv_heads", None) if heads is None else f"{heads} heads apart",
        getattr(spec, "head_size", None),
    )
    return "vllm/" + "/".join(str(fact).removeprefix("torch.") for fact in facts)
