"""Hybrid models in pipeline stages whose weights are read in the background: they await their stages' layers, then a name."""

import pytest

from tests.rigs.held_weights import HeldWeights, held_weights

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.setting import CHUNK
from tests.unit.vllm.hybrid.test_sizes import STAGED, TOKENS, WHOLE, StartEngine, joint

__all__ = ["held_weights"]
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("stages", [(3, 3), ()], ids=str)
def test_an_engine_of_stages_begins_with_their_layers_and_its_name(
    start: StartEngine, held_weights: HeldWeights, stages: tuple[int, ...]
) -> None:
    engine = joint(start, 2, layers=STAGED, stages=stages, path=held_weights.path)
    assert engine.ask("early", TOKENS).offers == [0]
    held_weights.let_begin(engine)
    assert engine.ask("cold", TOKENS).offers == [0]
    assert engine.ask("warm", TOKENS).offers == [WHOLE * CHUNK]
