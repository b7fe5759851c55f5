"""Circuit breaker and back-off, on a clock of the test's own."""

import random

import pytest

from kvpool.peers.back_off import BackOff, BackOffSettings
from kvpool.peers.circuit_breaker import FAILURES, TRIAL_S, BreakerState, CircuitBreaker, Permit
from tests.rigs.clock import HandClock

BACK_OFF = BackOffSettings(first_s=1.0, most_s=8.0)


class _Always:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def _breaker(clock: HandClock) -> CircuitBreaker:
    return CircuitBreaker(clock, _Always(1.0), back_off=BACK_OFF)


def _ask(breaker: CircuitBreaker) -> Permit:
    permit = breaker.ask_permit()
    assert permit is not None
    return permit


def _open(breaker: CircuitBreaker) -> None:
    for _ in range(FAILURES):
        breaker.fail(_ask(breaker))
    assert breaker.state.value == "open"


def test_it_opens_after_failures_in_a_row_alone() -> None:
    breaker = _breaker(HandClock())
    for _ in range(10):
        breaker.fail(_ask(breaker))
        breaker.fail(_ask(breaker))
        breaker.succeed(_ask(breaker))
        assert breaker.state.value == "closed"
    _open(breaker)
    assert breaker.ask_permit() is None
    assert breaker.opened == 1


def test_exactly_one_trial_after_the_pause() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.advance(0.999)
    assert breaker.ask_permit() is None
    clock.advance(0.002)
    trial = _ask(breaker)
    assert breaker.state.value == "half-open"
    assert breaker.ask_permit() is None
    breaker.succeed(trial)
    assert breaker.state.value == "closed"
    assert breaker.retry_s == 0


def test_each_failed_trial_waits_longer_up_to_the_bound_and_a_success_begins_anew() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    _open(breaker)
    for expected_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert breaker.retry_s == pytest.approx(expected_s)
        clock.advance(expected_s)
        breaker.fail(_ask(breaker))
        assert breaker.state.value == "open"
    clock.advance(8.0)
    breaker.succeed(_ask(breaker))
    _open(breaker)
    assert breaker.retry_s == pytest.approx(1.0)


def test_a_trial_without_an_outcome_has_failed() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.advance(1.0)
    lost = _ask(breaker)
    clock.advance(TRIAL_S)
    assert breaker.ask_permit() is None
    assert breaker.state.value == "open"
    breaker.succeed(lost)
    assert breaker.state.value == "open"


def test_late_outcomes_count_for_nothing() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    early = [_ask(breaker) for _ in range(8)]
    _open(breaker)
    breaker.succeed(early.pop())
    assert breaker.state.value == "open"
    clock.advance(1.0)
    breaker.succeed(_ask(breaker))
    for permit in early:
        breaker.fail(permit)
    assert breaker.state.value == "closed"


def test_a_new_life_closes_it() -> None:
    breaker = _breaker(HandClock())
    _open(breaker)
    breaker.reset()
    assert breaker.state.value == "closed"
    assert breaker.ask_permit() is not None


def test_random_outcomes_keep_the_invariant(seed: int) -> None:
    chance, clock = random.Random(seed), HandClock()
    breaker = CircuitBreaker(clock, chance, back_off=BACK_OFF)
    permits: list[Permit] = []
    for _ in range(5000):
        clock.advance(chance.random() * 2)
        if chance.random() < 0.6:
            permit = breaker.ask_permit()
            assert (permit is None) <= (breaker.state is not BreakerState.CLOSED)
            permits += [permit] if permit else []
        elif permits:
            outcome = breaker.succeed if chance.random() < 0.3 else breaker.fail
            outcome(permits.pop(chance.randrange(len(permits))))
        assert breaker.retry_s <= BACK_OFF.most_s
        breaker.verify()
    assert breaker.opened > 10


def test_back_off_has_jitter_and_a_bound(seed: int) -> None:
    back_off = BackOff(BackOffSettings(first_s=1.0, most_s=60.0), random.Random(seed))
    for failures in range(1, 2000):
        delay_s, full_s = back_off.fail(), min(60.0, 2.0 ** min(failures - 1, 10))
        assert full_s / 2 <= delay_s <= full_s
    assert len({back_off.fail() for _ in range(16)}) == 16
    back_off.succeed()
    assert back_off.fail() <= 1.0
