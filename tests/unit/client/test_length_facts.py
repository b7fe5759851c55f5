"""Kinds of RoPE that depend on a length, found in a model's configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.engines.length_facts import configuration_of, length_facts, length_scalings


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, []),
        ({"rope_theta": 1e4, "rope_scaling": None}, []),
        ({"rope_parameters": {"rope_type": "default"}}, []),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, []),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, []),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, ["longrope"]),
        ({"rope_scaling": {"type": "su"}}, ["su"]),
        ({"rope_scaling": {"type": "Dynamic", "factor": 2.0}}, ["dynamic"]),
        ({"rope_scaling": {"type": "a-later-one"}}, ["a-later-one"]),
        (
            {"rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": {"rope_type": "longrope"}}},
            ["dynamic", "longrope"],
        ),
        ({"text_config": {"rope_scaling": {"type": "dynamic"}}}, ["dynamic"]),
        ({"quantization_config": {"weights": {"type": "int", "num_bits": 8}}}, []),
    ],
)
def test_the_kinds_that_depend_on_the_length_are_named(values: dict[str, Any], kinds: list[str]) -> None:
    assert length_scalings(values) == kinds
    assert bool(length_facts(values, 8192)) is bool(kinds)


def test_a_configuration_is_read_however_it_comes() -> None:
    values = {"rope_scaling": {"type": "dynamic"}}
    assert configuration_of(None) == {}
    assert configuration_of(SimpleNamespace(**values)) == values
    assert configuration_of(SimpleNamespace(to_dict=lambda: values)) == values
