"""Pipeline stages: how many layers each has, computed by every process of an engine alone.

vLLM numbers ranks stage by stage, gives a worker the layers of its own stage and the scheduler those of the first one. All of
them need the layers of all stages, which make one Layout: so each process computes vLLM's own division of the model for each
stage, and compares it with the layers it was given. Where the two differ (a draft model's layers beside the last stage's,
layers that use others' KV) stages cannot be distinguished by their numbers, and the engine is not served.

Reads the configuration. Any thread.
"""

import re
from collections.abc import Sequence
from types import SimpleNamespace

from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import EngineConfig, ParallelConfig

PIPELINE = "pipeline_parallel"
LAYER_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")


def stage_count(parallel: ParallelConfig) -> int:
    """Stages of an engine; 1 where its layers are not spread."""
    return int(getattr(parallel, "pipeline_parallel_size", 1))


def own_stage(parallel: ParallelConfig) -> int:
    """The stage whose layers this process was given."""
    return parallel.rank // parallel.tensor_parallel_size % stage_count(parallel)


def stages_of(config: EngineConfig, layer_names: Sequence[str]) -> tuple[int, ...]:
    """The layers of each stage, none where there is one stage alone. `layer_names`: those that this process was given.

    Raises Unserved where these are not those of its stage.
    """
    parallel = config.parallel_config
    count = stage_count(parallel)
    if count == 1:
        return ()
    spans = _spans(config, count)
    own = own_stage(parallel)
    first, end = spans[own]
    strange = [name for name in layer_names if not _is_within(name, first, end)]
    if strange or len(layer_names) != end - first:
        shown = f"layer {strange[0]!r}" if strange else f"{len(layer_names)} layers of KV"
        raise Unserved(
            PIPELINE, f"pipeline stage {own} of {count} has {shown}, expected layers {first} to {end - 1} and no other"
        )
    return tuple(end - first for first, end in spans)


def _spans(config: EngineConfig, count: int) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one behind its last, by vLLM's own division. Raises Unserved without one."""
    ranks = config.parallel_config.tensor_parallel_size
    divide = getattr(config.model_config, "get_layers_start_end_indices", None)
    try:
        if divide is None:
            raise AttributeError("its model configuration has no get_layers_start_end_indices")
        places = [
            SimpleNamespace(rank=stage * ranks, tensor_parallel_size=ranks, pipeline_parallel_size=count)
            for stage in range(count)
        ]
        return [(int(first), int(end)) for first, end in map(divide, places)]
    except (AttributeError, TypeError, ValueError) as error:
        raise Unserved(PIPELINE, f"this vLLM does not give the layers of each of {count} stages: {error}") from error


def _is_within(name: str, first: int, end: int) -> bool:
    """Whether a layer's name has a number of the stage's, or none."""
    numbers = LAYER_NUMBER.findall(name)
    return not numbers or first <= int(numbers[0]) < end
