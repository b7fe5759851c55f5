"""Step times: prefill is measured by steps that mostly prefill, whatever decodes beside it, and by nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.engines.load_cost import RateEstimator
from kvpool_client.vllm.scheduler.step_times import StepTimes, prefill_tokens
from tests.rigs.clock import HandClock

# An engine on two processor cores: 1,860 tokens of prompts a second, and 64 decoding requests take 85 ms.
PREFILL_PER_S = 1860.0
DECODE_S = 0.085 / 64


class Engine:
    """Steps of a made engine, which take the time that its tokens take, and `fixed_s` in any case."""

    def __init__(self, *, decode_s: float = DECODE_S, fixed_s: float = 0.0) -> None:
        self.rates = RateEstimator()
        self._clock = HandClock()
        self._times = StepTimes(self.rates, self._clock)
        self._decode_s = decode_s
        self._fixed_s = fixed_s
        self._steps = 0

    @property
    def measured(self) -> float:
        return self.rates.rates().prefill_tokens_per_s

    def step(self, prompt: int = 0, decoding: int = 0, *, has_loads: bool = False, stall_s: float = 0.0) -> None:
        """A step with so many tokens of a prompt that goes on, and so many decoding requests."""
        step, requests = made_step({"prompt": (prompt, 3000, 1000)} if prompt else {}, decoding)
        self._steps += 1
        self._times.begin_step(self._steps, step, requests, has_loads=has_loads)
        self._clock.advance(self._fixed_s + prompt / PREFILL_PER_S + decoding * self._decode_s + stall_s)
        self._times.end_step(self._steps)


def made_step(running: dict[str, tuple[int, int, int]], decoding: int = 0, *, fresh: int = 0) -> tuple[Any, Any]:
    """The step and the requests: `running` has scheduled, known and computed tokens of each."""
    entries = {**running, **{f"decoding-{number}": (1, 601, 600) for number in range(decoding)}}
    counts = {name: count for name, (count, _, _) in entries.items()} | ({"fresh": fresh} if fresh else {})
    columns = SimpleNamespace(req_ids=[*entries], num_computed_tokens=[computed for _, _, computed in entries.values()])
    new = [SimpleNamespace(req_id="fresh", num_computed_tokens=0)] if fresh else []
    step = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=columns,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )
    requests = {
        name: SimpleNamespace(request=SimpleNamespace(num_tokens=known)) for name, (_, known, _) in entries.items()
    }
    return step, requests


@pytest.mark.parametrize(
    ("scheduled", "known", "computed", "counts"),
    [
        (512, 3000, 1000, True),  # a prompt that goes on
        (100, 1100, 1000, True),  # its last tokens
        (2, 1002, 1000, True),
        (1, 1001, 1000, False),  # decoding, or as cheap
        (4, 1001, 1000, False),  # decoding, with three tokens that are guessed
        (1, 1000, 1000, False),  # decoding, planned before the last token is known
        (512, 900, 0, True),  # again after a preemption
    ],
)
def test_tokens_of_prompts_are_counted_apart_from_decoded_ones(
    scheduled: int, known: int, computed: int, *, counts: bool
) -> None:
    step, requests = made_step({"request": (scheduled, known, computed)}, 7, fresh=30)
    assert prefill_tokens(step, requests) == 30 + scheduled * counts


def test_a_request_that_is_not_tracked_counts_as_decoding() -> None:
    step, _ = made_step({"request": (512, 3000, 1000)})
    assert prefill_tokens(step, {}) == 0


def test_steps_that_only_decode_measure_no_prefill() -> None:
    engine = Engine()
    for _ in range(20):
        engine.step(decoding=64)
    assert engine.measured == 0
    engine.step(512)
    for _ in range(20):
        engine.step(decoding=64)
    assert engine.measured == pytest.approx(PREFILL_PER_S)


@pytest.mark.parametrize("decoding", [0, 1, 8, 64])
@pytest.mark.parametrize("has_decoded", [True, False])
def test_prefill_beside_decoding_requests_is_measured_without_their_time(decoding: int, *, has_decoded: bool) -> None:
    """Before a step that only decodes is known, their part of the tokens counts."""
    engine = Engine()
    for _ in range(3 * has_decoded):
        engine.step(decoding=64)
    for _ in range(3):
        engine.step(512, decoding)
    assert engine.measured == pytest.approx(PREFILL_PER_S, rel=1e-6 if has_decoded or not decoding else 0.17)


def test_steps_with_few_tokens_of_prompts_do_not_count_once_prefill_was_measured() -> None:
    engine = Engine(fixed_s=0.02)
    for prompt in (256, 512, 1024):
        engine.step(prompt)
    assert engine.measured == pytest.approx(PREFILL_PER_S)
    for _ in range(9):
        engine.step(63)
        engine.step(100, 64)
    assert engine.measured == pytest.approx(PREFILL_PER_S)


def test_fixed_costs_of_steps_are_no_prefill_where_prompts_differ() -> None:
    engine = Engine(fixed_s=0.05)
    engine.step(64)
    assert engine.measured < 0.5 * PREFILL_PER_S
    for prompt in (64, 128, 256, 512, 1024):
        engine.step(prompt)
    assert engine.measured == pytest.approx(PREFILL_PER_S)


def test_an_engine_that_computes_the_rest_of_hits_alone_knows_what_it_computes_at_least() -> None:
    engine = Engine()
    for _ in range(9):
        engine.step(10, 64)
        engine.step(decoding=64)
    assert engine.measured == pytest.approx(74 / (10 / PREFILL_PER_S + 0.085))
    assert engine.measured < PREFILL_PER_S


def test_one_stall_changes_nothing_and_a_slow_first_step_not_for_long() -> None:
    engine = Engine()
    engine.step(512, stall_s=5.0)
    for _ in range(2):
        engine.step(512)
        assert engine.measured == pytest.approx(PREFILL_PER_S)
    engine.step(512, stall_s=60.0)
    assert engine.measured == pytest.approx(PREFILL_PER_S)
    for _ in range(4):
        engine.step(decoding=64)
    engine.step(decoding=64, stall_s=60.0)
    for _ in range(3):
        engine.step(512, 64)
    assert engine.measured == pytest.approx(PREFILL_PER_S)


def test_a_step_with_loads_and_one_without_tokens_measure_nothing() -> None:
    engine = Engine()
    for _ in range(3):
        engine.step(512, has_loads=True)
        engine.step(0, 64, has_loads=True, stall_s=5.0)
        engine.step(0)
    assert engine.measured == 0
    for _ in range(3):
        engine.step(512, 64)
    assert engine.measured == pytest.approx(PREFILL_PER_S, rel=0.17)


def test_of_overlapping_steps_each_begins_when_the_one_before_has_ended() -> None:
    rates, clock = RateEstimator(), HandClock()
    times = StepTimes(rates, clock)
    step, requests = made_step({"prompt": (1000, 3000, 1000)})
    for number in (1, 2, 3):
        times.begin_step(number, step, requests, has_loads=False)
    for number in (1, 2, 3):
        clock.advance(0.5)
        times.end_step(number)
        assert rates.rates().prefill_tokens_per_s == pytest.approx(2000)
    times.end_step(9)  # not one of its own
    assert rates.rates().prefill_tokens_per_s == pytest.approx(2000)
