"""Layers of all pipeline stages of a hybrid model, as workers show them to the scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.ranks.stage_layers import OwnLayers, StageLayers, needs_stage_layers
from kvpool_client.vllm.support import Unserved
from tests.rigs.vllm.specs import FullAttentionSpec, SlidingWindowSpec

FIRST, SECOND = OwnLayers((0, 1), (("l.0",), ("l.1",))), OwnLayers((0, 1), (("l.2",), ("l.3",)))
KINDS: Any = [SimpleNamespace(table=0, layer_names=("l.0",)), SimpleNamespace(table=1, layer_names=("l.1",))]


def test_layers_of_a_kind_are_those_of_each_stage() -> None:
    shown = {(0, 0): FIRST, (0, 1): FIRST, (1, 0): SECOND, (1, 1): SECOND}
    found = StageLayers.of_workers(shown, 2)
    assert found.of_kinds(KINDS, 0) == [(("l.0",), ("l.2",)), (("l.1",), ("l.3",))]


@pytest.mark.parametrize(
    "shown",
    [
        {(0, 0): FIRST},
        {(0, 0): FIRST, (2, 0): SECOND},
        {(0, 0): FIRST, (0, 1): SECOND, (1, 0): SECOND},
        {(0, 0): FIRST, (1, 0): "of another connector"},
        {},
    ],
    ids=["one-stage", "others-number", "ranks-differ", "foreign", "nothing"],
)
def test_what_does_not_show_every_stage_is_refused(shown: dict[tuple[int, int], object]) -> None:
    with pytest.raises(Unserved, match="have shown their layers, expected each of 2"):
        StageLayers.of_workers(shown, 2)


@pytest.mark.parametrize(
    ("stages", "own", "why"),
    [
        ((FIRST, OwnLayers((0,), (("l.2",),))), 0, r"groups \[0, 1\], \[0\], expected the same"),
        ((FIRST, OwnLayers((0, 2), SECOND.names)), 0, r"groups \[0, 1\], \[0, 2\], expected the same"),
        ((FIRST, SECOND), 1, "stage 1 has shown other layers"),
    ],
    ids=["fewer", "others", "not-mine"],
)
def test_stages_that_do_not_fit_are_refused(stages: tuple[OwnLayers, ...], own: int, why: str) -> None:
    with pytest.raises(Unserved, match=why):
        StageLayers(stages).of_kinds(KINDS, own)


@pytest.mark.parametrize(("stages", "windows", "head_groups"), [(1, (0, 12), 1), (2, (0,), 1), (2, (0, 12), 0)])
def test_other_engines_wait_for_nothing(stages: int, windows: tuple[int, ...], head_groups: int) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
    assert not needs_stage_layers(config, caches_of_windows(windows), head_groups=head_groups)
    config.parallel_config.pipeline_parallel_size = 2
    assert needs_stage_layers(config, caches_of_windows((0, 12)), head_groups=1)


def caches_of_windows(windows: tuple[int, ...]) -> Any:
    specs = [SlidingWindowSpec(sliding_window=window) if window else FullAttentionSpec() for window in windows]
    groups = [SimpleNamespace(layer_names=[f"l.{at}"], kv_cache_spec=spec) for at, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)
