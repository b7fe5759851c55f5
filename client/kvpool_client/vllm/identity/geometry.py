"""Geometry of vLLM's KV: one Layout for all shards, and the registered tensors as blocks of bytes.

Blocks are opaque: vLLM's backends order and pack what is inside as they like (the CPU backend by instruction set), so the
format's name carries everything that may change the order, and chunks are shared only where all of it is equal. Scheduler
and workers compute the same Layout from the same configuration; a worker then compares it with the tensors it is given.

Raises LayoutMismatch for KV that kvpool cannot store; the caller runs without a pool. Pure but for reading tensors' attributes;
any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import kvpool_native
from kvpool.layout import Layout
from kvpool.layouts.groups import STATE, Group
from kvpool.layouts.share import Share
from kvpool_client.vllm.identity.parts import STATE_FACTS, JointStates, KindOfLayers, Part, difference, kinds_of
from kvpool_client.vllm.ranks.placement import check_placement
from kvpool_client.vllm.ranks.ranks import Ranks, check_groups, groups_of_heads, layers_of_model
from kvpool_client.vllm.ranks.replicas import groups_of_states, of_all, replicas_by_kind
from kvpool_client.vllm.ranks.stage_layers import STAGED_GROUPS, StageLayers
from kvpool_client.vllm.ranks.stages import own_stage, stages_of
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import CacheConfig, CacheSpec, EngineConfig

AXIS_MAX = 65536
# Of the digest of a group's layer names.
DIGEST_HEX = 16
# The name of an engine's order of bytes in blocks of a spec, or of so many heads of it, beyond the configuration.
FormOf = Callable[[CacheSpec, int | None], str]
# The number of a layer's part, and its own number there.
LayerPlace = tuple[int, int]


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
    def may_cut_hits(self) -> bool:
        """Whether a load may bring less of a hit, up to any block, and vLLM is notified of the blocks that did not come: of an
        engine of one full part. Of others a hit has the end that windows were stored for."""
        return not self.layout.groups

    def usable_tokens(self, tokens: int) -> int:
        """The most that a load may bring of a prompt: one token is left to compute, and the load ends with a block, or a chunk
        where hits are not cut."""
        align = self.parts[0].block_tokens if self.may_cut_hits else self.chunk_tokens
        return (tokens - 1) // align * align

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.layout.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk in the middle of a prompt has: of the parts that need every chunk, or of all where none does."""
        counted = [part for part in self.parts if part.is_full] or self.parts
        return sum(part.layers * part.block_bytes * self.blocks_of(part) for part in counted)

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
    def layer_places(self) -> dict[str, tuple[LayerPlace, ...]]:
        """Where each layer is: one place, or of a state in a joint engine one for each run."""
        found: dict[str, tuple[LayerPlace, ...]] = {}
        for number, part in enumerate(self.parts):
            runs = part.runs_of_layer
            for layer, name in enumerate(part.layer_names):
                places = ((number, place) for place in range(layer * runs, (layer + 1) * runs))
                found[name] = (*found.get(name, ()), *places)
        return found

    @property
    def tables_kept(self) -> tuple[Part, ...]:
        """A part of each block table and kind of block: sections of a state are in the same blocks."""
        return tuple({(part.table, part.layer_names): part for part in self.parts}.values())

    def is_writer_of(self, part: Part, rank: int) -> bool:
        """Whether a rank saves its KV of a part."""
        return rank % (part.replicas if self.ranks.is_joint else self.ranks.replicas) == 0

    def share_of(self, rank: int) -> Share | tuple[Share, ...] | None:
        """What a rank has of a chunk, with groups of each one's; None where its chunks are its own."""
        ranks = self.ranks
        if not ranks.is_joint:
            return None
        stage, place = divmod(rank % ranks.count, ranks.tensor)
        shares = []
        for part, layout in zip(self.parts, self.layout.group_layouts, strict=True):
            heads = Share.of_rank(layout, place // part.replicas, ranks.tensor // part.replicas)
            shares.append(Share(*part.stage_span(stage, ranks.stages), heads.first_group, heads.groups))
        return tuple(shares) if self.layout.groups else shares[0]

    def shard(self, rank: int) -> Layout:
        """The layout of one worker's rank."""
        return self.layout.for_rank(self.ranks.shard_of(rank))


def geometry_of(
    config: EngineConfig,
    caches: CacheConfig,
    chunk_tokens: int,
    form_of: FormOf,
    *,
    head_groups: int = 0,
    stage_layers: StageLayers | None = None,
) -> Geometry:
    """The geometry of an engine. `head_groups`: of a joint engine's chunks; 0: its ranks have chunks apart. `stage_layers`: of
    a hybrid model in several stages. Raises Unserved."""
    parallel = config.parallel_config
    check_placement(parallel)
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unserved(
            "calculated_scales", "KV scales are calculated while serving, expected scales that are part of the model"
        )
    kinds = kinds_of(caches)
    _check_parts(config, kinds)
    replicas = replicas_by_kind(config, caches, kinds)
    is_joint = bool(head_groups) and all(kind.is_divided for kind in kinds)
    joint = JointStates(parallel.tensor_parallel_size, groups_of_states(config)) if is_joint else None
    of_kinds = [kind.parts(chunk_tokens, same, joint=joint) for kind, same in zip(kinds, replicas, strict=True)]
    stages = stages_of(config, [name for kind in kinds for name in kind.layer_names])
    has_groups = len(of_kinds) > 1 or not of_kinds[0][0].is_full
    if stages and (has_groups or kinds[0].spec is not caches.kv_cache_groups[0].kv_cache_spec):
        _check_staged_groups(kinds, caches, is_known=has_groups and is_joint and stage_layers is not None)
        assert stage_layers is not None
        names = stage_layers.of_kinds(kinds, own_stage(parallel))
        of_kinds = [
            tuple(replace(part, stage_names=of_stages) for part in of_kind)
            for of_kind, of_stages in zip(of_kinds, names, strict=True)
        ]
    parts = tuple(part for of_kind in of_kinds for part in of_kind)
    hash_tokens = getattr(caches, "hash_block_size", None) or min(part.block_tokens for part in parts)
    if chunk_tokens % hash_tokens:
        raise Unserved(
            "coarse_hashes",
            f"block hashes cover {hash_tokens} tokens, expected a divisor of the chunk's {chunk_tokens}",
        )
    ranks = Ranks(parallel.tensor_parallel_size, of_all(replicas), stages, is_joint)
    form = _Form(config, caches, form_of)
    shapes = [
        form.joint_shape(kind, part, ranks, head_groups) if is_joint else form.shape(kind)
        for kind, of_kind in zip(kinds, of_kinds, strict=True)
        for part in of_kind
    ]
    if has_groups:
        groups = tuple(_group_of(part, shape) for part, shape in zip(parts, shapes, strict=True))
        layout = Layout(groups=groups, chunk_tokens=chunk_tokens, rank=None, world=ranks.shards)
    else:
        own = len(parts[0].layer_names)
        layout = Layout(
            layers=layers_of_model(stages, own) if is_joint else max(stages, default=own),
            chunk_tokens=chunk_tokens,
            rank=None,
            world=ranks.shards,
            stages=() if is_joint else stages,
            **shapes[0],
        )
    return Geometry(layout, parts, len(caches.kv_cache_groups), caches.num_blocks, hash_tokens, ranks)


def _check_staged_groups(kinds: Sequence[KindOfLayers], caches: CacheConfig, *, is_known: bool) -> None:
    """Raises Unserved where layers of an engine of several stages are of kinds that not every process knows."""
    # A stage with a spec for each layer may still differ from other stages, which no process can see.
    are_equal = all(kind.spec is caches.kv_cache_groups[kind.table].kv_cache_spec for kind in kinds)
    if not is_known or not are_equal:
        raise Unserved(STAGED_GROUPS, "layers have blocks of several kinds in an engine of several stages")


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


def _group_of(part: Part, shape: dict[str, Any]) -> Group:
    """A group of the layout. Its format names its layers: releases of vLLM divide a model's layers of one kind differently,
    into groups of the same shape."""
    layers = kvpool_native.blake3("\n".join(part.model_names).encode()).hex()[:DIGEST_HEX]
    named = shape | {"format": f"{shape['format']}/layers-{layers}"}
    return Group(kind=part.kind, window=part.window, layers=len(part.model_names) * part.runs_of_layer, **named)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the blocks of an engine's parts are in the layout, with formats that name all that orders the bytes in them."""

    config: EngineConfig
    caches: CacheConfig
    form_of: FormOf

    def shape(self, kind: KindOfLayers) -> dict[str, Any]:
        """The geometry of a part's chunks: opaque blocks, of which one is a state."""
        spec = kind.spec
        if kind.kind == STATE:
            facts = "/".join(str(getattr(spec, name, None)) for name in STATE_FACTS)
            return {"state_bytes": kind.block_bytes, "format": self._state_format(spec, facts)}
        heads, width = _token_shape(kind.block_bytes, spec.block_size)
        return {
            "kv_heads": heads,
            "head_dim": width,
            "dtype": "uint8",
            "planes": 1,
            "format": self._format(spec, None),
            "block_tokens": spec.block_size,
        }

    def joint_shape(self, kind: KindOfLayers, part: Part, ranks: Ranks, head_groups: int) -> dict[str, Any]:
        """The geometry of a part's chunks of which each rank has some head groups: the model's, whatever the engine's sizes
        are."""
        spec, distinct = kind.spec, ranks.tensor // part.replicas
        if part.section is not None:
            size, facts = part.section.run_bytes * distinct, part.section.facts
            groups = 1 if part.section.is_whole else head_groups
            check_groups(groups, distinct, size, "bytes of a state's run")
            return {"state_bytes": size, "head_groups": groups, "format": self._state_format(spec, facts)}
        heads = int(getattr(spec, "num_kv_heads", 1))
        total = heads * distinct
        groups = groups_of_heads(total, distinct, head_groups)
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
            "format": self._format(spec, total),
            "block_tokens": spec.block_size,
            "head_groups": groups,
        }

    def _state_format(self, spec: CacheSpec, facts: str) -> str:
        digest = kvpool_native.blake3(facts.encode()).hex()[:DIGEST_HEX]
        return f"vllm/{self.form_of(spec, None)}/state-{digest}"

    def _format(self, spec: CacheSpec, heads_apart: int | None) -> str:
        """`heads_apart`: the model's heads, where each has bytes of its own; None: a block's bytes are those of a rank."""
        facts = (
            self.form_of(spec, None if heads_apart is None else 1),
            type(spec).__name__.removesuffix("Spec"),
            getattr(self.caches, "kv_cache_layout", None),
            getattr(spec, "dtype", None),
            getattr(self.config.cache_config, "cache_dtype", None),
            getattr(spec, "num_kv_heads", None) if heads_apart is None else f"{heads_apart} heads apart",
            getattr(spec, "head_size", None),
        )
        return "vllm/" + "/".join(str(fact).removeprefix("torch.") for fact in facts)


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
