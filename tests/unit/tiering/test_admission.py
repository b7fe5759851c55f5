"""Admission: which chunks are worth a write, the effect of a day's budget, and the order. On a clock that the test sets."""

import random

import pytest

from kvpool.tiering.admission import (
    BEGINS_BELOW,
    ENDS_AT,
    NS_PER_DAY,
    POLICIES,
    UNBOUNDED,
    Admission,
    Admitted,
    WriteBudget,
)

DAY_BYTES = 24_000_000
HOUR_NS = NS_PER_DAY // 24
BURST = DAY_BYTES // 24
CHUNK = BURST // 100


def admission_of(policy: str = "all", day_bytes: int = DAY_BYTES, *, knows_chances: bool = True) -> Admission:
    return Admission(POLICIES[policy], WriteBudget(day_bytes, 0), lambda: knows_chances)


def test_without_a_budget_every_chunk_is_always_admitted() -> None:
    admission = admission_of(day_bytes=0)
    admission.spend(1 << 60, 0)
    assert admission.step(1) is Admitted.ALL
    assert admission.affordable(CHUNK, 1) == UNBOUNDED
    assert not admission.needs_ghosts
    assert admission.written_bytes == 1 << 60
    assert admission.stats(1) == {"admission": "all", "admission_tightenings": 0, "write_budget_left_bytes": 0}


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        (0.0, Admitted.ALL),
        (0.5, Admitted.ALL),
        (0.51, Admitted.LIKELY),
        (0.75, Admitted.LIKELY),
        (0.76, Admitted.USED_AGAIN),
        (1.0, Admitted.USED_AGAIN),
        (1.01, Admitted.NOTHING),
    ],
)
def test_each_step_begins_at_its_share(spent: float, expected: Admitted) -> None:
    admission = admission_of()
    admission.spend(int(spent * BURST), 0)
    assert admission.step(0) is expected


@pytest.mark.parametrize(
    ("refilled", "expected"),
    [
        (0.09, Admitted.NOTHING),
        (0.11, Admitted.USED_AGAIN),
        (0.34, Admitted.USED_AGAIN),
        (0.36, Admitted.LIKELY),
        (0.59, Admitted.LIKELY),
        (0.61, Admitted.ALL),
    ],
)
def test_a_step_ends_later_than_it_begins(refilled: float, expected: Admitted) -> None:
    admission = admission_of()
    admission.spend(BURST + 1, 0)
    assert admission.step(0) is Admitted.NOTHING
    assert admission.step(int(refilled * HOUR_NS) + 10**9) is expected
    assert ENDS_AT[Admitted.NOTHING] > BEGINS_BELOW[Admitted.NOTHING]


def test_between_two_shares_the_step_does_not_oscillate() -> None:
    admission = admission_of()
    admission.spend(BURST * 55 // 100, 0)
    assert admission.step(0) is Admitted.LIKELY
    now_ns = 0
    for _ in range(50):  # it spends what it earns: between 0.5 and 0.6
        now_ns += HOUR_NS // 25
        admission.spend(BURST // 25, now_ns)
        assert admission.step(now_ns) is Admitted.LIKELY
    assert admission.stats(now_ns)["admission_tightenings"] == 1


def test_affordable_writes_end_where_the_next_step_begins() -> None:
    admission = admission_of()
    counts = []
    while count := admission.affordable(CHUNK, 0):
        counts.append((admission.step(0), count))
        admission.spend(count * CHUNK, 0)
    by_step = {step: sum(count for at, count in counts if at is step) for step in Admitted}
    assert [step for step, _ in counts] == sorted(step for step, _ in counts)
    assert sum(by_step.values()) == 100
    assert by_step[Admitted.ALL] in (50, 51)
    assert by_step[Admitted.LIKELY] in (25, 26)
    assert admission.step(0) is Admitted.NOTHING


def test_an_operators_order_may_use_the_whole_budget_and_no_more() -> None:
    admission = admission_of()
    admission.spend(BURST * 8 // 10, 0)
    assert admission.affordable(CHUNK, 0, is_ordered=True) == 20
    admission.spend(20 * CHUNK, 0)
    assert admission.affordable(CHUNK, 0, is_ordered=True) == 0


def test_a_write_beyond_the_budget_waits() -> None:
    admission = admission_of()
    admission.spend(BURST * 88 // 100, 0)
    assert admission.affordable(BURST // 5, 0) == 0
    assert admission.step(0) is Admitted.NOTHING
    assert admission.step(HOUR_NS * 7 // 100) is Admitted.NOTHING, (
        "0.19 is more than the step needs, less than the chunk"
    )
    assert admission.step(HOUR_NS * 9 // 100) is Admitted.USED_AGAIN


def test_a_bucket_holds_a_chunk_however_small_the_budget() -> None:
    admission = admission_of()
    large = 3 * BURST
    assert admission.affordable(large, 0) == 1
    admission.spend(large, 0)
    assert admission.affordable(large, HOUR_NS) == 0
    assert admission.step(2 * HOUR_NS) is Admitted.NOTHING
    assert admission.affordable(large, 3 * HOUR_NS + 1) == 1


@pytest.mark.parametrize("policy", list(POLICIES))
def test_over_any_time_no_more_is_written_than_the_budget_and_one_burst(policy: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"KVPOOL_SEED={seed}")
    chance = random.Random(seed)
    admission = admission_of(policy, knows_chances=chance.random() < 0.5)
    now_ns = 0
    while now_ns < 3 * NS_PER_DAY:
        now_ns += chance.randrange(HOUR_NS // 10)
        before, tightened = admission.step(now_ns), admission.tightened
        wanted = chance.randrange(1, 20)
        count = min(wanted, admission.affordable(CHUNK, now_ns))
        assert count > 0 or before is Admitted.NOTHING or admission.step(now_ns) is Admitted.NOTHING
        admission.spend(count * CHUNK, now_ns)
        after = admission.step(now_ns)
        assert admission.tightened - tightened <= 1, "one step at a time"
        assert after >= before, "a write makes nothing laxer"
        assert admission.written_bytes <= DAY_BYTES * now_ns / NS_PER_DAY + BURST + 1
    assert admission.written_bytes > DAY_BYTES


def test_a_clock_that_steps_back_earns_nothing() -> None:
    budget = WriteBudget(DAY_BYTES, HOUR_NS)
    budget.spend(BURST, HOUR_NS)
    assert budget.left(HOUR_NS) == 0
    assert budget.left(0) == 0
    assert budget.left(HOUR_NS) == 0
