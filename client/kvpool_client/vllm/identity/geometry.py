"""Geometry of vLLM's KV: one Layout for all shards, and the registered tensors as blocks of bytes.

Blocks are opaque: vLLM's backends order and pack what is inside as they like (the CPU backend by instruction set), so the
format's name carries everything that may change the order, and chunks are shared only where all of it is equal. Scheduler
and workers compute the same Layout from the same configuration; a worker then compares it with the tensors it is given.

Raises LayoutMismatch for KV that kvpool cannot store; the caller runs without a pool. Pure but for reading tensors' attributes;
any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.layout import Layout
from kvpool_client.vllm.identity.placement import check_placement
from kvpool_client.vllm.identity.stages import PIPELINE, stages_of
from kvpool_client.vllm.support import REMEDIES, Unserved
from kvpool_client.vllm.surface import CacheConfig, CacheSpec, EngineConfig

# Only these kinds keep every block of every token for the whole life of a request.
WHOLE_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
AXIS_MAX = 65536
# Fields that must be equal in all layers for one spec to stand for them.
SPEC_FACTS = ("block_size", "page_size_bytes", "num_kv_heads", "head_size", "dtype")


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

    `layout`: of a scheduler, standing for all shards of all pipeline stages. `layer_names`: this process's stage's. `replicas`:
    ranks in a row that hold the same KV; one of them saves. `hash_tokens`: tokens behind each of the engine's block hashes.
    """

    layout: Layout
    layer_names: tuple[str, ...]
    blocks: int
    block_tokens: int
    block_bytes: int
    hash_tokens: int
    replicas: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.layout.chunk_tokens

    @property
    def chunk_blocks(self) -> int:
        """Blocks that a chunk covers."""
        return self.layout.chunk_tokens // self.block_tokens

    def shard(self, rank: int) -> Layout:
        """The layout of one worker's rank."""
        return self.layout.for_rank(rank % (self.layout.world * self.replicas) // self.replicas)


def geometry_of(config: EngineConfig, caches: CacheConfig, chunk_tokens: int, form: str) -> Geometry:
    """The geometry of an engine. `form` names the order of bytes inside a block, beyond the configuration."""
    parallel = config.parallel_config
    check_placement(parallel)
    if len(caches.kv_cache_groups) != 1:
        raise Unserved(
            "several_groups",
            f"the model has {len(caches.kv_cache_groups)} KV cache groups, expected one (a hybrid model)",
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unserved(
            "calculated_scales", "KV scales are calculated while serving, expected scales that are part of the model"
        )
    group = caches.kv_cache_groups[0]
    spec = one_spec(group.kv_cache_spec)
    kind = type(spec).__name__
    if kind not in WHOLE_ATTENTION:
        raise Unserved(
            "other_attention", f"the KV cache is of kind {kind}, expected one of {', '.join(WHOLE_ATTENTION)}"
        )
    if kind == "MLAAttentionSpec" and _computes_prefixes_anew(config):
        raise Unserved(
            "mla_without_prefixes",
            "the engine computes MLA without prefix caching on this processor, and would attend wrongly to a prefix that is "
            "loaded",
        )
    hash_tokens = getattr(caches, "hash_block_size", None) or spec.block_size
    if chunk_tokens % hash_tokens:
        raise Unserved(
            "coarse_hashes",
            f"block hashes cover {hash_tokens} tokens, expected a divisor of the chunk's {chunk_tokens}",
        )
    stages = stages_of(config, group.layer_names)
    if stages and spec is not group.kv_cache_spec:
        # A stage with equal layers may still differ from other stages, which no process can see.
        raise Unserved(
            "odd_blocks", "layers have blocks of several kinds in an engine of several stages", REMEDIES[PIPELINE]
        )
    tensor_ranks = parallel.tensor_parallel_size
    replicas = _replicas(caches, kind, tensor_ranks)
    heads, width = _token_shape(spec.page_size_bytes, spec.block_size)
    layout = Layout(
        layers=max(stages, default=len(group.layer_names)),
        kv_heads=heads,
        head_dim=width,
        dtype="uint8",
        chunk_tokens=chunk_tokens,
        planes=1,
        rank=None,
        world=tensor_ranks // replicas * max(1, len(stages)),
        format=_format(config, caches, spec, form),
        block_tokens=spec.block_size,
        stages=stages,
    )
    return Geometry(
        layout=layout,
        layer_names=tuple(group.layer_names),
        blocks=caches.num_blocks,
        block_tokens=spec.block_size,
        block_bytes=spec.page_size_bytes,
        hash_tokens=hash_tokens,
        replicas=replicas,
    )


def one_spec(spec: CacheSpec) -> CacheSpec:
    """The spec that stands for every layer of a group: of a spec for each layer (`UniformTypeKVCacheSpecs`) the first, if all
    are equal.

    Workers are shown a spec for each layer where the scheduler is shown the first one alone. Raises LayoutMismatch where the
    layers differ, which only workers can see.
    """
    by_layer: Mapping[str, CacheSpec] = getattr(spec, "kv_cache_specs", {})
    if not by_layer:
        return spec
    (first_name, first), *others = by_layer.items()
    for name, other in others:
        for fact in SPEC_FACTS:
            here, there = getattr(first, fact, None), getattr(other, fact, None)
            if here != there or type(first) is not type(other):
                what = f"{fact} {there}" if here != there else f"the kind {type(other).__name__}"
                raise Unserved(
                    "odd_blocks", f"layer {name!r} has {what}, expected what layer {first_name!r} has: {first}"
                )
    return first


def block_views(geometry: Geometry, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Each layer's tensor as [blocks, items of a block in the order of memory]. Raises LayoutMismatch on another shape."""
    missing = [name for name in geometry.layer_names if name not in tensors]
    if missing:
        raise Unserved(
            "odd_blocks", f"layer {missing[0]!r} was not registered, expected all {len(geometry.layer_names)}"
        )
    return [_block_view(name, tensors[name], geometry) for name in geometry.layer_names]


def _block_view(name: str, tensor: Tensor, geometry: Geometry) -> Tensor:
    """Dimension 0 counts blocks (or their equal parts, where the backend's blocks are smaller); inside there are no gaps."""
    item = tensor.element_size()
    rows, inner = int(tensor.shape[0]), [int(size) for size in tensor.shape[1:]]
    steps = [int(step) for step in tensor.stride()]
    parts, rest = divmod(rows, geometry.blocks)
    dense = 1
    for size, step in sorted(zip(inner, steps[1:], strict=True), key=lambda axis: (axis[1], axis[0])):
        if size > 1 and step != dense:
            raise Unserved("odd_blocks", f"layer {name!r} has strides {steps}, expected blocks without gaps")
        dense *= size
    if rest or not parts or parts * dense * item != geometry.block_bytes:
        raise Unserved(
            "odd_blocks",
            f"layer {name!r} has shape {tuple(tensor.shape)} of {item}-byte items, expected {geometry.blocks} blocks of "
            f"{geometry.block_bytes} bytes",
        )
    if parts > 1 and steps[0] != dense:
        raise Unserved(
            "odd_blocks", f"layer {name!r} has strides {steps}, expected the parts of a block one behind the other"
        )
    block_items = parts * dense
    return tensor.as_strided((geometry.blocks, block_items), (steps[0] * parts, 1), tensor.storage_offset())


def _replicas(caches: CacheConfig, kind: str, tensor_ranks: int) -> int:
    known = getattr(caches, "kv_tp_replicas", None)
    replicas = int(known) if known else (tensor_ranks if kind == "MLAAttentionSpec" else 1)
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


def _format(config: EngineConfig, caches: CacheConfig, spec: CacheSpec, form: str) -> str:
    facts = (
        form,
        type(spec).__name__.removesuffix("Spec"),
        getattr(caches, "kv_cache_layout", None),
        getattr(spec, "dtype", None),
        getattr(config.cache_config, "cache_dtype", None),
        getattr(spec, "num_kv_heads", None),
        getattr(spec, "head_size", None),
    )
    return "vllm/" + "/".join(str(fact).removeprefix("torch.") for fact in facts)
