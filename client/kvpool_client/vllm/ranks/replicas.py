"""Replicas: how many ranks in a row of a tensor-parallel group hold the same KV of some layers.

A rank has one KV head at least: where a model has fewer heads than there are ranks, several ranks have the same one. vLLM shows
that of latent KV alone (`kv_tp_replicas`). Of heads it follows from the model's configuration, where that has one number of KV
heads for all layers; where it might have another one for some, each rank's heads count as its own.

Reads the configuration. Any thread.
"""

from collections.abc import Iterable, Mapping
from math import gcd

from kvpool_client.vllm.identity.parts import KindOfLayers
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.surface import CacheConfig, EngineConfig

# Names of fields about numbers of KV heads in models' configurations have one of these in them.
HEAD_WORDS = (
    *("kv_head", "key_value_head", "head_kv", "query_group", "attention_group", "heads_in_group"),
    *("block_configs", "per_layer_config"),
)
# Names of the number of groups of B and C in configurations of Mamba 2's models.
STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def replicas_by_kind(config: EngineConfig, caches: CacheConfig, kinds: Iterable[KindOfLayers]) -> list[int]:
    """Of each kind of layers, how many ranks in a row hold the same KV. Raises Unserved where vLLM shows no divisor."""
    ranks = config.parallel_config.tensor_parallel_size
    known = getattr(caches, "kv_tp_replicas", None)
    shown = int(known) if known else 1
    if ranks % shown:
        raise Unserved("odd_blocks", f"{shown} of {ranks} ranks hold the same KV, expected a divisor")
    found = []
    for kind in kinds:
        if kind.is_latent:
            found.append(shown if known else ranks)
        elif kind.has_heads and int(getattr(kind.spec, "num_kv_heads", 0)) == 1:
            heads = heads_of_all_layers(config)
            found.append(max(shown, ranks // heads) if heads and ranks % heads == 0 else shown)
        else:
            found.append(1 if kind.is_divided and not kind.has_heads else shown)
    return found


def of_all(replicas: Iterable[int]) -> int:
    """How many ranks in a row hold the same KV of every layer."""
    return gcd(*replicas)


def heads_of_all_layers(config: EngineConfig) -> int:
    """The number of KV heads that every layer of the model has, of all ranks; 0 where it is not certain."""
    count = getattr(config.model_config, "get_total_num_kv_heads", None)
    described = _described(config)
    if count is None or not described or getattr(config, "speculative_config", None) is not None:
        return 0
    heads = int(count())
    named = [value for one in described for value in _named_numbers(one)]
    return heads if named and all(type(value) is int and value == heads for value in named) else 0


def groups_of_states(config: EngineConfig) -> int:
    """The number of groups of B and C that the layers of a Mamba 2 model have, of all ranks; 0 where it is not certain."""
    named = {one[name] for one in _described(config) for name in STATE_GROUPS if name in one}
    found = named.pop() if len(named) == 1 else 0
    return found if type(found) is int else 0


def _described(config: EngineConfig) -> list[Mapping[object, object]]:
    """The model's configuration and that of its language model, as far as they are shown."""
    of_model = (getattr(config.model_config, name, None) for name in ("hf_config", "hf_text_config"))
    shown = (getattr(one, "to_dict", None) for one in of_model)
    return [show() for show in shown if callable(show)]


def _named_numbers(described: Mapping[object, object]) -> Iterable[object]:
    for name, value in described.items():
        if any(word in str(name) for word in HEAD_WORDS):
            if value is not None:
                yield value
        elif isinstance(value, Mapping):
            yield from _named_numbers(value)
