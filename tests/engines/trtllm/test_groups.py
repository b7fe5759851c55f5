"""TensorRT-LLM's layer groups over a real daemon, driven by an executor that takes window pages back after every step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from tests.engines.trtllm.windowed import WindowedExecutor  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
Start = Callable[..., WindowedExecutor]


@pytest.fixture
def start(start_trtllm: Callable[..., Any]) -> Start:
    """Starts engines with layer groups."""
    return lambda daemon, **args: start_trtllm(daemon, kind="windowed", **args)


@pytest.mark.parametrize(
    "windows", [(None, 8), (8, None), (None, 6, 13), (8,), (5, 12), (None, 1), (None, 9), (None, 100)]
)
@pytest.mark.parametrize(("ranks", "planes"), [(1, 2), (2, 2), (2, 1)])
def test_a_second_engine_claims_what_the_first_computed(
    daemon: Daemon, start: Start, windows: tuple[int | None, ...], ranks: int, planes: int
) -> None:
    first = start(daemon, windows=windows, ranks=ranks, planes=planes)
    cold = first.answer(PROMPT, 6)
    assert cold[0] == 0
    second = start(daemon, windows=windows, ranks=ranks, planes=planes)
    assert second.answer(PROMPT, 6) == (28, cold[1])
    assert first.answer(PROMPT, 6) == (28, cold[1])
    assert daemon.stats()["leases"] == 0
    wait_until(lambda: daemon.stats()["reservations"] == 0, "no reservations are left")
    assert daemon.problems() == []
