"""Admission: what earns a write, and what a day's budget does to it."""

import random

import pytest

from kvpool.index.admission import NS_PER_DAY, Admission, AdmitAll, AdmitSecondTouch, WriteBudget

DAY_BYTES = 24_000_000
HOUR_NS = NS_PER_DAY // 24
BURST = DAY_BYTES // 24


def test_without_a_budget_everything_is_written_for_ever() -> None:
    admission = Admission(AdmitAll(), WriteBudget(0, 0))
    admission.spend(1 << 60, 0)
    assert admission.fewest_touches(1) == 0
    assert not admission.needs_ghosts
    assert admission.written_bytes == 1 << 60


def test_second_touch_asks_for_two() -> None:
    admission = Admission(AdmitSecondTouch(), WriteBudget(0, 0))
    assert admission.fewest_touches(0) == 2
    assert admission.needs_ghosts


def test_a_budget_that_runs_dry_tightens_then_stops_then_recovers() -> None:
    admission = Admission(AdmitAll(), WriteBudget(DAY_BYTES, 0))
    assert admission.needs_ghosts
    assert admission.fewest_touches(0) == 0
    admission.spend(BURST // 2, 0)
    assert admission.fewest_touches(0) == 2
    admission.spend(BURST, 0)
    assert admission.fewest_touches(0) is None
    assert admission.stats(0) == {"ssd.budget_left_bytes": -BURST // 2, "ssd.touches_needed": -1}
    assert admission.fewest_touches(HOUR_NS // 2) is None
    assert admission.fewest_touches(HOUR_NS * 3 // 4) == 2
    assert admission.fewest_touches(2 * HOUR_NS) == 0


@pytest.mark.parametrize("policy", [AdmitAll(), AdmitSecondTouch()])
def test_over_any_day_no_more_is_written_than_the_budget_and_one_burst(policy: AdmitAll | AdmitSecondTouch) -> None:
    seed = random.randrange(1 << 32)
    print(f"KVPOOL_SEED={seed}")
    chance = random.Random(seed)
    admission = Admission(policy, WriteBudget(DAY_BYTES, 0))
    now_ns, job = 0, BURST // 50
    while now_ns < 3 * NS_PER_DAY:
        now_ns += chance.randrange(HOUR_NS // 10)
        if admission.fewest_touches(now_ns) is not None:
            admission.spend(job, now_ns)
        assert admission.written_bytes <= DAY_BYTES * now_ns / NS_PER_DAY + BURST + job
    assert admission.written_bytes > DAY_BYTES


def test_a_clock_that_steps_back_earns_nothing() -> None:
    budget = WriteBudget(DAY_BYTES, HOUR_NS)
    budget.spend(BURST, HOUR_NS)
    assert budget.left(HOUR_NS) == 0
    assert budget.left(0) <= 0
    assert budget.left(HOUR_NS) <= 0
