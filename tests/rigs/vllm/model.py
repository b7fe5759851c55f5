"""A model of the scripted engine (see `engine.py`): its layers in KV cache groups, and what vLLM shows of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.rigs.vllm.config import stage_spans
from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.specs import (
    LAYERS,
    WIDTH,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    name_of_layer,
)

# Windows of the groups, 0 for one that attends to all tokens; STATE has none.
PLAIN = (0,)
MIXED = (0, 12, 12)
STATE = -1
# Layers of a group, where a model is not plain.
GROUP_LAYERS = 2


class ScriptedModel:
    """See the module. `windows`: of each group; `is_local`: they are pieces of a prompt. `numbers`: of the model's layers in
    each group; none: in a row. `stages`: the layers in each pipeline stage; none: there is one."""

    def __init__(
        self,
        windows: Sequence[int],
        numbers: Sequence[Sequence[int]] = (),
        stages: Sequence[int] = (),
        *,
        is_local: bool = False,
    ) -> None:
        each = LAYERS if tuple(windows) == PLAIN else GROUP_LAYERS
        self.windows, self.is_local = tuple(windows), is_local
        self.numbers = numbers or [range(each * group, each * (group + 1)) for group in range(len(windows))]
        self.stages = tuple(stages) or (each * len(windows),)
        self.group_layers = each
        self.names = [[name_of_layer(number) for number in of_group] for of_group in self.numbers]

    @property
    def is_plain(self) -> bool:
        """Whether each layer attends to all tokens."""
        return self.windows == PLAIN

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent states."""
        return STATE in self.windows

    def layers_of(self, group: int, stage: int) -> list[int]:
        """Which of a group's layers a stage has."""
        first, end = stage_spans(self.stages)[stage]
        return [at for at, number in enumerate(self.numbers[group]) if first <= number < end]

    def first_read(self, group: int, computed: int) -> int:
        """The first token that the next one attends to in a group."""
        window = self.windows[group]
        if window == STATE:
            return max(0, computed - 1)
        if self.is_local and window:
            return computed // window * window
        return max(0, computed - window + 1) if window else 0

    def caches(
        self,
        blocks: int,
        heads_of: Sequence[int],
        *,
        replicas: int = 1,
        stage: int = 0,
        of_states: dict[str, Any],
        shows_each: bool = False,
    ) -> Any:
        """vLLM's KVCacheConfig of a stage whose ranks have so many heads of each layer of a group. `of_states`: fields of the
        specs of states; `shows_each`: with a spec for each layer, as workers alone are shown."""
        groups, tensors = [], []
        for group, window in enumerate(self.windows):
            names = [self.names[group][at] for at in self.layers_of(group, stage)]
            made = [self._spec(window, heads, of_states) for heads in heads_of[: len(names) or 1]]
            spec = UniformTypeKVCacheSpecs(dict(zip(names, made, strict=True))) if shows_each else made[0]
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
            for name, one in zip(names, made, strict=False):  # a stage may have none
                page = one.page_size_bytes
                tensors.append(SimpleNamespace(layers=[name], layer_stride=page * blocks, block_stride=page))
        return SimpleNamespace(
            num_blocks=blocks, kv_cache_groups=groups, kv_tp_replicas=replicas, kv_cache_tensors=tensors
        )

    def _spec(self, window: int, heads: int, of_states: dict[str, Any]) -> Any:
        page = heads * BLOCK * WIDTH
        if window == STATE:
            return MambaSpec(**of_states)
        if window and self.is_local:
            return ChunkedLocalAttentionSpec(page_size_bytes=page, num_kv_heads=heads, attention_chunk_size=window)
        if window:
            return SlidingWindowSpec(page_size_bytes=page, num_kv_heads=heads, sliding_window=window)
        return FullAttentionSpec(page_size_bytes=page, num_kv_heads=heads)
