"""Durations of steps that prefill: the cost of vLLM's own computing, to compare with a load.

A step computes tokens of prompts and decodes beside that. It measures prefill if that took most of its time; the time of the
decoding requests is known from steps that only decode, and is at least their part of the tokens. Any other step with tokens of
a prompt shows what the engine computes at least. Steps may overlap: one begins to run when it was planned and the one before it
has ended. A step with loads measures nothing. The scheduler's thread.
"""

from collections import deque
from collections.abc import Mapping

from kvpool.clock import NS_PER_S, Clock
from kvpool_client.engines.load_cost import MEASUREMENTS, RateEstimator
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.scheduler.unverified_loads import STEPS_MAX
from kvpool_client.vllm.surface import EngineStep

# A step with fewer tokens of prompts has mostly fixed costs (guess).
PREFILL_TOKENS_MIN = 64
# A decoded token takes no longer than so many of a prompt, where no step was seen that only decodes (guess).
TOKENS_OF_A_DECODED_ONE = 8


class StepTimes:
    """Adds the measurements of steps to `rates`. At most STEPS_MAX are under way."""

    def __init__(self, rates: RateEstimator, clock: Clock) -> None:
        self._rates = rates
        self._clock = clock
        # By step: when it was planned, the tokens that it prefills and decodes, and whether it computes any.
        self._begun: dict[int, tuple[int, int, int, bool]] = {}
        self._last_end_ns = 0
        # Seconds and tokens of steps that only decoded.
        self._decoding: deque[tuple[float, int]] = deque(maxlen=MEASUREMENTS)

    def __repr__(self) -> str:
        return f"<StepTimes {len(self._begun)} under way>"

    def begin_step(self, number: int, step: EngineStep, requests: Mapping[str, Tracked], *, has_loads: bool) -> None:
        """A step is planned."""
        prefilled = decoded = 0
        if not has_loads:
            decoded = step.total_num_scheduled_tokens
            if step.scheduled_new_reqs or decoded > len(step.num_scheduled_tokens):
                prefilled = prefill_tokens(step, requests)
                decoded -= prefilled
        self._begun[number] = (self._clock.now_ns(), prefilled, decoded, bool(step.num_scheduled_tokens))
        if len(self._begun) > STEPS_MAX:
            del self._begun[next(iter(self._begun))]

    def end_step(self, number: int) -> None:
        """A step has been reported."""
        now_ns = self._clock.now_ns()
        begun_ns, prefilled, decoded, _ = self._begun.pop(number, (now_ns, 0, 0, False))
        seconds = (now_ns - max(begun_ns, self._last_end_ns)) / NS_PER_S
        self._last_end_ns = now_ns
        if not prefilled:
            if decoded:
                self._decoding.append((seconds, decoded))
            return
        decoding_s = max(self._decoding_s(decoded), seconds * decoded / (prefilled + decoded))
        has_mostly_prefilled = decoding_s <= seconds / 2 and (
            bool(self._decoding) or decoded * TOKENS_OF_A_DECODED_ONE <= prefilled
        )
        if prefilled >= PREFILL_TOKENS_MIN and has_mostly_prefilled:
            self._rates.add_prefill(prefilled, seconds - decoding_s)
        else:
            self._rates.add_least_prefill(prefilled + decoded, seconds)

    @property
    def is_computing(self) -> bool:
        """Whether a step that computes anything is under way."""
        return any(is_computing for _, _, _, is_computing in self._begun.values())

    def _decoding_s(self, tokens: int) -> float:
        """How long a step takes that only decodes so many tokens: of more than were measured as long as of those."""
        if not self._decoding:
            return 0.0
        seconds, measured = sorted(self._decoding)[(len(self._decoding) - 1) // 2]
        return seconds * min(1.0, tokens / measured)


def prefill_tokens(step: EngineStep, requests: Mapping[str, Tracked]) -> int:
    """The tokens of a step that belong to prompts, those that are computed again after a preemption included: of requests with
    more than one known token to compute. All others are decoded."""
    counts = step.num_scheduled_tokens
    tokens = sum(counts.get(fresh.req_id, 0) for fresh in step.scheduled_new_reqs)
    running = step.scheduled_cached_reqs
    for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
        count = counts.get(request_id, 0)
        # Looked at only where it may be a prompt: a forward pass has evicted the rest from the processor's caches.
        if count > 1 and request_id in requests and requests[request_id].request.num_tokens - computed > 1:
            tokens += count
    return tokens
