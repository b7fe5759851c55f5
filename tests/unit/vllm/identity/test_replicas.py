"""Ranks that have the same KV heads, as far as the model's configuration says so for certain."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.ranks.replicas import groups_of_states, heads_of_all_layers

ONE = {"num_key_value_heads": 4, "hidden_size": 64, "rope": {"theta": 10_000}}


def config_with(described: dict[str, Any], **more: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: described)
    return SimpleNamespace(model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4, hf_text_config=text), **more)


def test_one_number_for_every_layer_is_certain() -> None:
    assert heads_of_all_layers(config_with(ONE)) == 4
    assert heads_of_all_layers(config_with({"multi_query_group_num": 4})) == 4
    assert heads_of_all_layers(config_with(ONE | {"other": {"num_kv_heads": 4, 0: "label"}})) == 4
    assert heads_of_all_layers(config_with(ONE | {"num_global_key_value_heads": None})) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"num_global_key_value_heads": 2},  # of the layers of full attention
        {"swa_num_key_value_heads": 8},
        {"num_attention_groups": 8},
        {"sliding": {"num_kv_heads": 8}},
        {"num_key_value_heads": [4, 2, 4]},  # by layer
        {"num_key_value_heads": 2},  # and vLLM counts 4
        {"num_key_value_heads": True},
        {"block_configs": [{"attention": {"n_heads_in_group": 4}}]},
        {"per_layer_config": {}},
    ],
    ids=str,
)
def test_anything_that_layers_may_differ_in_is_not(more: dict[str, Any]) -> None:
    assert heads_of_all_layers(config_with(ONE | more)) == 0


@pytest.mark.parametrize(
    ("described", "groups"),
    [
        ({"mamba_n_groups": 1}, 1),
        ({"n_groups": 8}, 8),
        ({"mamba_ngroups": 1, "n_groups": 8}, 0),
        ({"n_groups": True}, 0),
        ({"n_group": 1}, 0),  # of experts
    ],
    ids=str,
)
def test_groups_of_b_and_c_are_in_the_configuration(described: dict[str, Any], groups: int) -> None:
    assert groups_of_states(config_with(described)) == groups


def test_what_the_whole_models_configuration_says_counts_too() -> None:
    config = config_with(ONE)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"audio_config": {"num_key_value_heads": 20}})
    assert heads_of_all_layers(config) == 0


def test_without_a_number_or_with_a_draft_model_nothing_is_certain() -> None:
    assert heads_of_all_layers(config_with({"hidden_size": 64})) == 0
    assert heads_of_all_layers(config_with(ONE, speculative_config=SimpleNamespace())) == 0
    assert heads_of_all_layers(config_with(ONE, speculative_config=None)) == 4
    assert heads_of_all_layers(SimpleNamespace(model_config=SimpleNamespace())) == 0
