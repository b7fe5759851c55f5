"""vLLM's configuration as the scripted engine (see `engine.py`) is given it, as far as the connector reads it."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from tests.rigs.vllm.request import BLOCK
from tests.rigs.vllm.specs import LAYERS, NAMES, FullAttentionSpec


def stage_spans(stages: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one behind its last."""
    return list(pairwise(accumulate(stages, initial=0)))


def caches_of(*, replicas: int = 1, spec: Any = None, layers: Sequence[int] = range(LAYERS)) -> Any:
    """vLLM's KVCacheConfig, with these layers."""
    group = SimpleNamespace(layer_names=[NAMES[layer] for layer in layers], kv_cache_spec=spec or FullAttentionSpec())
    return SimpleNamespace(num_blocks=8, kv_cache_groups=[group], kv_tp_replicas=replicas)


def config_of(
    socket: str,
    ranks: int = 1,
    rank: int = 0,
    *,
    stages: Sequence[int] = (LAYERS,),
    weights: str = "seven",
    path: str = "",
    kv_role: str = "kv_both",
    **extra: Any,
) -> Any:
    """vLLM's VllmConfig, as far as it is read. `weights`: of the Hub; `path`: of a directory that is in their place."""

    def spans_by_rank(parallel: Any) -> tuple[int, int]:
        """Asked as vLLM's own is, with what it reads alone."""
        assert parallel.pipeline_parallel_size == len(stages)
        stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
        span: tuple[int, int] = stage_spans(stages)[stage]
        return span

    keys = {"kvpool.socket": socket, "kvpool.chunk_tokens": 2 * BLOCK}
    keys.update({name.replace("__", "."): value for name, value in extra.items()})
    commit = hashlib.sha1(weights.encode()).hexdigest()
    hub = SimpleNamespace(to_dict=lambda: {"hidden_size": 16, "_name_or_path": "/anywhere"})
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=keys, kv_load_failure_policy="recompute", kv_role=kv_role
        ),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=len(stages)),
        model_config=SimpleNamespace(
            model=path or "org/model",
            revision=commit,
            dtype="torch.uint8",
            hf_config=hub,
            get_layers_start_end_indices=spans_by_rank,
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )
