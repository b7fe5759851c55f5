"""Layers of all pipeline stages of a hybrid model, by kind of layers.

vLLM shows each process the layers of its own stage, and the scheduler those of the first one; a chunk's extents and its key
need those of all. So each worker hands its own to the scheduler with vLLM's handshake of connectors, and the scheduler's first
plans have all of them for the workers.

    worker    register_kv_caches ──► handshake: own layers                first plan ──► connects
    scheduler                                  └──► all stages ──► connects ──┘

Immutable; any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool_client.vllm.identity.parts import KindOfLayers, kinds_of, needs_groups
from kvpool_client.vllm.ranks.stages import stage_count
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import CacheConfig, EngineConfig

STAGED_GROUPS = "staged_groups"


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """The names of a stage's layers, by kind. `tables`: vLLM's group of each kind."""

    tables: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Those of every stage."""

    stages: tuple[OwnLayers, ...]

    @classmethod
    def of_workers(cls, shown: Mapping[tuple[int, int], object], count: int) -> "StageLayers":
        """Out of what each worker has shown, by its stage and its rank there. Raises Unserved where a stage is missing, or its
        ranks differ."""
        found: dict[int, set[OwnLayers]] = {}
        for (stage, _), own in shown.items():
            if isinstance(own, OwnLayers):
                found.setdefault(stage, set()).add(own)
        if sorted(found) != list(range(count)) or any(len(each) != 1 for each in found.values()):
            raise Unserved(
                STAGED_GROUPS,
                f"stages {sorted(found)} have shown their layers, expected each of {count} and equal ones on all of its ranks",
            )
        return cls(tuple(found[stage].pop() for stage in range(count)))

    def of_kinds(self, kinds: Sequence[KindOfLayers], own_stage: int) -> list[tuple[tuple[str, ...], ...]]:
        """The names of each stage's layers of each kind. Raises Unserved where a stage has other kinds, or this process's are
        not those of its stage."""
        here = tuple(kind.table for kind in kinds)
        if any(stage.tables != here for stage in self.stages):
            raise Unserved(
                STAGED_GROUPS,
                f"stages have layers of vLLM's groups {', '.join(str(list(stage.tables)) for stage in self.stages)}, expected "
                "the same in each: divide the layers otherwise (VLLM_PP_LAYER_PARTITION)",
            )
        if self.stages[own_stage].names != tuple(kind.layer_names for kind in kinds):
            raise Unserved(STAGED_GROUPS, f"stage {own_stage} has shown other layers than this process was given")
        return [tuple(stage.names[number] for stage in self.stages) for number in range(len(kinds))]


def own_layers(caches: CacheConfig) -> OwnLayers:
    """The layers that this process was given."""
    kinds = kinds_of(caches)
    return OwnLayers(tuple(kind.table for kind in kinds), tuple(kind.layer_names for kind in kinds))


def needs_stage_layers(config: EngineConfig, caches: CacheConfig, *, head_groups: int) -> bool:
    """Whether an engine is served only once the layers of all stages are known."""
    return bool(head_groups) and stage_count(config.parallel_config) > 1 and needs_groups(caches)
