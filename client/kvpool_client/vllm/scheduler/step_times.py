"""Durations of steps that prefill: the cost of vLLM's own computing, to compare with a load.

Steps may overlap: one begins to run when it was planned and the one before it has ended. A step with loads measures nothing.
The scheduler's thread.
"""

from kvpool.clock import NS_PER_S, Clock
from kvpool_client.engines.load_cost import RateEstimator
from kvpool_client.vllm.scheduler.unverified_loads import STEPS_MAX
from kvpool_client.vllm.surface import EngineStep

# Steps with fewer tokens are decoding, which does not measure prefill.
PREFILL_TOKENS_MIN = 64


class StepTimes:
    """Adds the measurements of steps to `rates`. At most STEPS_MAX are under way."""

    def __init__(self, rates: RateEstimator, clock: Clock) -> None:
        self._rates = rates
        self._clock = clock
        self._begun: dict[int, tuple[int, int]] = {}
        self._last_end_ns = 0

    def __repr__(self) -> str:
        return f"<StepTimes {len(self._begun)} under way>"

    def begin(self, number: int, step: EngineStep, *, has_loads: bool) -> None:
        """A step is planned."""
        tokens = 0 if has_loads else sum(step.num_scheduled_tokens.values())
        self._begun[number] = (self._clock.now_ns(), tokens)
        while len(self._begun) > STEPS_MAX:
            self._begun.pop(next(iter(self._begun)))

    def end(self, number: int) -> None:
        """A step has been reported."""
        now_ns = self._clock.now_ns()
        begun_ns, tokens = self._begun.pop(number, (now_ns, 0))
        if tokens >= PREFILL_TOKENS_MIN:
            self._rates.add_prefill(tokens, (now_ns - max(begun_ns, self._last_end_ns)) / NS_PER_S)
        self._last_end_ns = now_ns
