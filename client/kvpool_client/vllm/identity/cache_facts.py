"""Facts of an engine's caches that give bytes their meaning: all fields of each layer's spec, and vLLM's words for its caches.

A field that is not known here counts: what a new release adds may change bytes, and engines that differ in it share nothing.
Left out is only what sizes a cache, and what an engine computes of that after its start. Pure; any thread.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from kvpool_client.vllm.surface import CacheGroup, CacheSpec

# Fields of vLLM's cache configuration that change no byte of a block.
SIZES = frozenset(
    {
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "simple_cpu_offload_num_blocks",
        "effective_attention_block_size",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "hash_block_size",
        "cache_hit_alignment_tokens",
        "prefix_match_unit",
        "prefix_cache_retention_interval",
        "enable_mamba_shared_prefix_checkpoint",
        "enable_prefix_caching",
        "user_specified_block_size",
        "_block_size_resolved",
        "swap_space",
        "cpu_offload_gb",
        "kv_offloading_size",
        "kv_offloading_backend",
    }
)
# Fields of a spec that are a rank's: where a row is of the whole model they differ with the sizes of parallelism alone.
OF_RANK = frozenset({"num_kv_heads", "num_head_slots", "max_tp_shards", "page_size_padded", "state_content_bytes"})


def cache_words(cache_config: object) -> dict[str, str]:
    """vLLM's configuration of its caches. What is unset or off is left out: a new release has more of that."""
    return _words(cache_config, SIZES)


def specs_of(group: CacheGroup) -> Mapping[str, CacheSpec]:
    """The specs of a group's layers, by name; under no name where one is shown for all."""
    by_layer: Mapping[str, CacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return by_layer or {"": group.kv_cache_spec}


def spec_words(group: CacheGroup, *, is_of_model: bool) -> dict[str, dict[str, str]]:
    """All that a group's specs have, by layer. `is_of_model`: without what is a rank's."""
    left_out = OF_RANK if is_of_model else ()
    return {
        name: {"kind": type(spec).__name__, **_words(spec, left_out)} for name, spec in sorted(specs_of(group).items())
    }


def _words(value: object, left_out: Iterable[str]) -> dict[str, str]:
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
    else:
        names = list(getattr(value, "__dict__", ()))
    given = {name: getattr(value, name, None) for name in names if name not in left_out}
    return {name: str(each) for name, each in given.items() if each is not None and each is not False and each != []}
