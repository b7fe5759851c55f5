"""Lookups over a real daemon whose deadline passes at any of their looks at the clock: no wrong byte, and nothing is kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool_client.trtllm.claims import stager
from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
LOOKS_MAX = 60


class JumpingClock:
    """A clock that stands for so many looks, and is far in the future then."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def now_ns(self) -> int:
        self.left -= 1
        return 0 if self.left >= 0 else 1 << 60


@pytest.mark.parametrize(("kind", "lengths"), [("plain", range(0, 29, 4)), ("windowed", (0, 28))])
def test_a_lookup_that_is_late_anywhere_is_claimed_in_part_or_computed(
    shared_daemon: Daemon, start_trtllm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, lengths: Any
) -> None:
    monkeypatch.setattr(stager, "PIECE_BYTES", 1)
    engine = start_trtllm(shared_daemon, kind=kind, ranks=2)
    half = engine.scheduler.half
    cold = engine.answer(PROMPT, 3)[1]
    assert engine.answer(PROMPT, 3) == (28, cold)
    free, late, claims = half.stats()["staging_slots_free"], 0, set()
    for looks in range(1, LOOKS_MAX, 2):
        half._clock = JumpingClock(looks)
        claimed, generated = engine.answer(PROMPT, 3)
        assert generated == cold
        assert claimed in lengths
        claims.add(claimed)
        if claimed < 28:
            late += 1
            assert half.stats()["late_requests"] == late
    assert {0, 28} <= claims
    half._clock = None
    engine.warm_up()
    assert engine.answer(PROMPT, 3) == (28, cold)
    wait_until(lambda: engine.scheduler.half.stats()["staging_slots_free"] == free, "the slots are free")
    wait_until(lambda: shared_daemon.stats()["leases"] == 0, "the leases have ended")
    assert half._guard.counts() == {}
