"""Random lives of TensorRT-LLM engines with layer groups: every KV that a layer attends to is checked by the executor.

A seed is a life: its windows, steps and requests, which part from common beginnings, are aborted, replayed, handed back in
part, found by the engine itself, and outlive daemons.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from tests.engines.trtllm.standin import Executor  # noqa: E402

pytestmark = pytest.mark.torch

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 8), (5, None, 13), (None, 6), (None, 9, 17), (7,), (None, 1, 30))
STEPS, SHORT = 120, 30


class Life:
    """One engine's life."""

    def __init__(self, engine: Executor, daemon: Daemon, dice: np.random.Generator) -> None:
        self.engine, self.daemon, self.dice = engine, daemon, dice
        self.beginnings = [dice.integers(0, 900, 48).tolist() for _ in range(3)]

    def live(self, steps: int) -> None:
        """Steps in between random events: a short life has as many of the rare ones as a long one."""
        again, restarts = 0.05 * STEPS / steps, 0.005 * STEPS / steps
        for _ in range(steps):
            event = self.dice.random()
            if event < 0.45 and len(self.engine._active) < 5:
                self.ask()
            elif event < 0.45 + again and self.engine._active:
                self.again()
            elif 0.45 + again <= event < 0.45 + again + restarts:
                self.daemon.kill()
                self.daemon.start()
            self.engine._step_tokens = int(self.dice.choice([3, 4, 7, 16, 1000]))
            self.engine.step()
        self.engine.run()

    def claim(self) -> bool:
        """Ask for a beginning; whether anything of it came from the pool."""
        request: Any = self.engine.ask(self.beginnings[0], 1)
        self.engine.run()
        return bool(request.claimed > 0)

    def ask(self) -> None:
        """A request that has its beginning from others, some of which the engine may have itself; perhaps handed back in
        part."""
        begun = self.beginnings[int(self.dice.integers(3))][: int(self.dice.integers(1, 49))]
        prompt = [*begun, *self.dice.integers(0, 900, int(self.dice.integers(1, 12))).tolist()]
        blocks = (len(prompt) - 1) // 4
        held = 4 * int(self.dice.integers(0, blocks + 1)) if self.dice.random() < 0.3 else 0
        request: Any = self.engine.ask(prompt, int(self.dice.integers(1, 9)), held=held)
        if request.claimed and self.dice.random() < 0.3:
            last = request.computed
            self.engine.hand_back(request, held, held + 4 * int(self.dice.integers(1, request.claimed // 4 + 1)))
            assert request.computed in (last, held)
        elif request.claimed and self.dice.random() < 0.5:
            end, half = int(self.dice.integers(held + 1, request.computed + 1)), self.engine.scheduler.half
            if half._prompts[request.request_id].claim.can_end_at(end, half._geometry) and end < request.computed:
                self.engine.hand_back(request, end, request.computed)

    def again(self) -> None:
        """The runtime takes a request's pages away: with a notification, or by a new lookup."""
        request = self.engine._active[int(self.dice.integers(len(self.engine._active)))]
        if self.dice.random() < 0.5:
            self.engine.abort(request)
        else:
            self.engine.replay(request)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        *((seed, SHORT) for seed in range(6)),
        *(pytest.param(seed, STEPS, marks=pytest.mark.slow) for seed in range(60)),
    ],
)
def test_no_layer_ever_attends_to_other_bytes(
    daemon: Daemon, start_trtllm: Callable[..., Executor], seed: int, steps: int
) -> None:
    dice = np.random.default_rng(seed)
    windows = WINDOWS[seed % len(WINDOWS)]
    engine = start_trtllm(
        daemon,
        kind="windowed",
        windows=windows,
        ranks=1 + seed % 2,
        blocks=160,
        shows_matched=bool(dice.random() < 0.7),
        overlaps=bool(dice.random() < 0.5),
    )
    life = Life(engine, daemon, dice)
    life.live(steps)
    engine.warm_up()
    wait_until(life.claim, "what a life saved is claimed, however late it was saved")
    for half in (engine.scheduler.half, *(worker.half for worker in engine.workers)):
        assert half._guard.counts() == {}, "what fails would be a miss"
    assert daemon.problems() == []
    wait_until(lambda: daemon.stats()["reservations"] == 0, "no reservations are left")
    assert daemon.stats()["leases"] == 0
    claims: Any = engine.scheduler.half._claims
    wait_until(lambda: _reclaimed(engine, claims), "every staged slot is free")
    for worker in engine.workers:
        saves = worker.half._saves
        wait_until(lambda saves=saves: _all_free(saves), "every slot of windows is free")  # type: ignore[misc]  # bound now
    assert all(sorted(free) == list(range(160)) for free in engine.free), "the executor has all pages back"


def _reclaimed(engine: Executor, claims: Any) -> bool:
    engine._nothing_is_saved()
    engine.scheduler.half._look_at_board()
    return bool(claims._free.free == claims.slots)


def _all_free(saves: Any) -> bool:
    saves.advance_saves()
    windows = saves._source.memory._windows.values()
    return all(sorted(window.free) == list(range(window.cache.blocks)) for window in windows)
