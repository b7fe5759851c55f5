"""Parts of an engine's KV: layers of one kind, window and block size that share a block table, each one group of the layout.

vLLM divides the layers of a hybrid model into KV cache groups, each with a block table; where the layers of a group differ in
their blocks, it is several parts. An engine of one part that needs every chunk has a plain layout.

    full      attention to all tokens        every chunk
    window    a sliding window               the last chunks before a hit's end
              attention within pieces of a prompt (chunked local attention): no further back than a window of a piece
    state     a recurrent state (Mamba, linear attention)   the last chunk: the block at its end

Raises Unserved for kinds that no chunk can hold. Pure but for reading attributes; any thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm

from kvpool.layouts.groups import FULL, STATE, WINDOW
from kvpool_client.vllm.identity.cache_facts import specs_of
from kvpool_client.vllm.identity.state_sections import Section, sections_of
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import CacheConfig, CacheGroup, CacheSpec

# Kinds that keep every block of every token for the whole life of a request.
WHOLE_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW_ATTENTION = ("SlidingWindowSpec", "SlidingWindowMLASpec")
LOCAL_ATTENTION = ("ChunkedLocalAttentionSpec",)
STATES = ("MambaSpec",)
# Kinds whose KV ranks of a tensor-parallel engine divide by heads.
DIVIDED_BY_HEADS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
# The mode in which vLLM keeps the states at ends of blocks, and names the blocks that they are in.
KEPT_STATES = "align"
# The block that stands in a table for those that vLLM has let go; nothing is ever written there that is read.
NULL_BLOCK = 0
# What a state's bytes are.
STATE_FACTS = ("mamba_type", "shapes", "dtypes")
# Fields that must be equal in all layers of a part.
SPEC_FACTS = (
    *("block_size", "page_size_bytes", "num_kv_heads", "head_size", "dtype", "sliding_window", "attention_chunk_size"),
    *STATE_FACTS,
)


@dataclass(frozen=True, slots=True)
class Part:
    """Layers that are one group of the layout, or all layers. `table`: the number of vLLM's group, whose block table they have;
    `window`: tokens that they attend to, 0: all; `run`: how many chunks before a hit's end that needs; `is_local`: the window
    is the piece of the prompt that a token is in, which is let go as a whole; `replicas`: ranks in a row that hold the same.

    `section`: of a state, the runs that are a part of their own in a joint engine, each of which counts as a layer.
    `stage_names`: the layers of each pipeline stage, none where there is one alone."""

    table: int
    layer_names: tuple[str, ...]
    block_tokens: int
    block_bytes: int
    kind: str
    window: int
    run: int
    is_local: bool = False
    replicas: int = 1
    section: Section | None = None
    stage_names: tuple[tuple[str, ...], ...] = ()

    @property
    def layers(self) -> int:
        """Layers of the layout's group that this process's stage has."""
        return len(self.layer_names) * self.runs_of_layer

    @property
    def model_names(self) -> tuple[str, ...]:
        """The layers of all stages."""
        return tuple(chain.from_iterable(self.stage_names)) or self.layer_names

    def stage_span(self, stage: int, stages: Sequence[int]) -> tuple[int, int]:
        """The first layer of the layout's group that a stage has, and how many. `stages`: the layers of each, of all parts."""
        counts = [len(names) * self.runs_of_layer for names in self.stage_names] or stages
        return (sum(counts[:stage]), counts[stage]) if counts else (0, self.layers)

    @property
    def runs_of_layer(self) -> int:
        """How many layers of the layout's group one of the model's is."""
        return len(self.section.offsets) if self.section is not None else 1

    @property
    def is_full(self) -> bool:
        """Whether it needs every chunk."""
        return self.kind == FULL

    @property
    def is_state(self) -> bool:
        """Whether a chunk is the state at its end, in one block."""
        return self.kind == STATE

    def oldest_token(self, computed: int) -> int:
        """The first token whose block a request with so many computed ones still has: vLLM lets go of those that the next one
        does not attend to."""
        if self.is_local:
            return computed // self.window * self.window
        return max(0, computed - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class JointStates:
    """What states of a joint engine are divided for: `ranks` of a tensor-parallel group, `groups` of B and C (0: not known)."""

    ranks: int
    groups: int


@dataclass(frozen=True, slots=True)
class KindOfLayers:
    """Layers with equal blocks in one of vLLM's groups, of whose first layer `spec` is. `is_seen`: whether the scheduler sees
    these blocks as workers do."""

    table: int
    spec: CacheSpec
    layer_names: tuple[str, ...]
    block_bytes: int
    is_seen: bool = True

    @property
    def kind(self) -> str:
        """The kind of the layout's group."""
        name = type(self.spec).__name__
        if name in WHOLE_ATTENTION:
            return FULL
        if name in WINDOW_ATTENTION + LOCAL_ATTENTION:
            return WINDOW
        if name in STATES:
            self._check_states()
            return STATE
        raise Unserved(
            "other_attention",
            f"a KV cache group is of kind {name}, expected one of "
            f"{', '.join((*WHOLE_ATTENTION, *WINDOW_ATTENTION, *LOCAL_ATTENTION, *STATES))}",
        )

    def _check_states(self) -> None:
        mode = getattr(self.spec, "mamba_cache_mode", None)
        if mode != KEPT_STATES:
            raise Unserved("states_not_kept", f"mamba_cache_mode is {mode!r}, expected {KEPT_STATES!r}")
        if getattr(self.spec, "num_speculative_blocks", 0):
            raise Unserved("speculative_states", "states have tokens in them that a draft only proposes")

    @property
    def has_heads(self) -> bool:
        """Whether ranks of a tensor-parallel engine have heads each, whose number is known: that of layers with other blocks
        than the first one's is shown to workers alone."""
        return type(self.spec).__name__ in DIVIDED_BY_HEADS and self.block_bytes == self.spec.page_size_bytes

    @property
    def is_latent(self) -> bool:
        """Whether every rank has the same KV, of all heads."""
        return "MLA" in type(self.spec).__name__

    @property
    def is_divided(self) -> bool:
        """Whether it is known what each rank of a tensor-parallel engine of any size has: heads, or runs of a state."""
        return self.has_heads or (self.kind == STATE and bool(sections_of(self.spec)))

    @property
    def is_local(self) -> bool:
        """Whether these layers attend within pieces of a prompt."""
        return type(self.spec).__name__ in LOCAL_ATTENTION

    @property
    def window(self) -> int:
        """Tokens of a sliding window, or of a piece; 0 without one."""
        name = "attention_chunk_size" if self.is_local else "sliding_window"
        return int(getattr(self.spec, name, 0) or 0) if self.kind == WINDOW else 0

    def parts(self, chunk_tokens: int, replicas: int, *, joint: JointStates | None) -> tuple[Part, ...]:
        """The part that these layers are with such chunks; of states in a joint engine one for each section."""
        whole = Part(
            table=self.table,
            layer_names=self.layer_names,
            block_tokens=self.spec.block_size,
            block_bytes=self.block_bytes,
            kind=self.kind,
            window=self.window,
            run=1 if self.kind == STATE else -(-self.window // chunk_tokens),
            is_local=self.is_local,
            replicas=replicas,
        )
        if joint is None or self.kind != STATE:
            return (whole,)
        return tuple(
            replace(whole, section=one, block_bytes=one.run_bytes, replicas=joint.ranks if one.is_whole else replicas)
            for one in sections_of(self.spec, joint.groups)
        )


def needs_groups(caches: CacheConfig) -> bool:
    """Whether an engine's layout has groups, if it can be served at all."""
    kinds = kinds_of(caches)
    if not all(kind.is_seen for kind in kinds):  # the scheduler sees one kind in each of vLLM's groups
        kinds = kinds[: len(caches.kv_cache_groups)]
    return len(kinds) != 1 or type(kinds[0].spec).__name__ not in WHOLE_ATTENTION


def has_states(caches: CacheConfig) -> bool:
    """Whether layers of an engine have recurrent states."""
    return any(type(kind.spec).__name__ in STATES for kind in kinds_of(caches))


def align_tokens(caches: CacheConfig) -> int:
    """Tokens of which a block's end is the end of a block in every part."""
    return lcm(*(kind.spec.block_size for kind in kinds_of(caches)))


def kinds_of(caches: CacheConfig) -> list[KindOfLayers]:
    """The kinds of layers of an engine, in the order of vLLM's groups.

    Workers are shown a spec for each layer where the scheduler is shown the first one alone. Both are shown where each layer's
    blocks lie (`kv_cache_tensors`), and find the same kinds in that.
    """
    pages = _block_bytes_of(caches)
    return [found for table, group in enumerate(caches.kv_cache_groups) for found in _kinds_in(table, group, pages)]


def _block_bytes_of(caches: CacheConfig) -> dict[str, int]:
    """Bytes of a block of each layer, where vLLM shows how its layers lie: one behind the other, or inside each block."""
    tensors = getattr(caches, "kv_cache_tensors", None) or ()
    return {
        name: min(int(tensor.layer_stride), int(tensor.block_stride))
        for tensor in tensors
        for name in getattr(tensor, "layers", ())
    }


def _kinds_in(table: int, group: CacheGroup, pages: Mapping[str, int]) -> Iterator[KindOfLayers]:
    """The kinds in one of vLLM's groups, by the first layer of each."""
    first = _first_spec(group)
    if len({pages.get(name) for name in group.layer_names}) > 1 and all(name in pages for name in group.layer_names):
        sizes = dict.fromkeys(pages[name] for name in group.layer_names)
        for size in sizes:
            yield KindOfLayers(table, first, tuple(name for name in group.layer_names if pages[name] == size), size)
        return
    by_layer = specs_of(group)
    kinds: dict[tuple[object, ...], tuple[CacheSpec, list[str]]] = {}
    for name in group.layer_names:
        spec = by_layer.get(name, group.kv_cache_spec)
        kinds.setdefault(_facts(spec), (spec, []))[1].append(name)
    for spec, layers in kinds.values():
        yield KindOfLayers(table, spec, tuple(layers), spec.page_size_bytes, is_seen=len(kinds) == 1)


def _first_spec(group: CacheGroup) -> CacheSpec:
    """The spec of a group's first layer, which is all that the scheduler is shown."""
    return next(iter(specs_of(group).values()))


def difference(first: KindOfLayers, other: KindOfLayers) -> str:
    """What the layers of two kinds in one of vLLM's groups differ in, for people."""
    names = ("kind", *SPEC_FACTS)
    pairs = zip(names, _facts(first.spec), _facts(other.spec), strict=True)
    name, known, found = next(pair for pair in pairs if pair[1] != pair[2])
    return (
        f"layer {other.layer_names[0]!r} has {name} {found}, expected what layer {first.layer_names[0]!r} has: {known}"
    )


def _facts(spec: CacheSpec) -> tuple[object, ...]:
    return (type(spec).__name__, *(getattr(spec, fact, None) for fact in SPEC_FACTS))
