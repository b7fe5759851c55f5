"""Pace of a node: what was measured decides, slow nodes fall at once, and rise again when nobody has asked them for a while."""

import random

import pytest

from kvpool.tiers.peer.node_records import NODES_MAX, NodeRecords
from kvpool.tiers.peer.pace import MIB, PRIOR_BYTES_PER_S, PRIOR_WAIT_S, Pace
from tests.rigs.clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def pace(clock: HandClock) -> Pace:
    return Pace(clock)


@pytest.mark.parametrize("rate", [2e6, 100e6, 5e9])
def test_pulls_make_the_pace_their_own(pace: Pace, rate: float) -> None:
    for _ in range(30):
        pace.note_answer(0.004)
        pace.note_bytes(128 * MIB, 128 * MIB / rate + 0.004)
    assert pace.bytes_per_s == pytest.approx(rate, rel=0.15)
    assert pace.wait_s == pytest.approx(0.004, rel=0.15)


def test_one_pull_that_took_long_is_enough_to_be_slow(pace: Pace) -> None:
    for _ in range(10):
        pace.note_bytes(64 * MIB, 0.05)
    assert pace.bytes_per_s > 1e9
    pace.note_bytes(0, 5.0)
    assert pace.bytes_per_s < 10e6
    pace.note_bytes(MIB, 5.0)
    assert pace.bytes_per_s < 2e6


def test_many_small_pulls_do_not_make_a_fast_node_slow(pace: Pace) -> None:
    """Each takes as long as its connection, which the wait stands for."""
    for _ in range(1000):
        pace.note_answer(0.001)
        pace.note_bytes(MIB // 4, 0.0013)
    assert pace.bytes_per_s > 0.5e9


def test_an_answer_that_never_came_counts_as_a_long_one(pace: Pace) -> None:
    pace.note_answer(2.0)
    assert pace.wait_s > 0.2


def test_with_time_a_slow_node_is_worth_a_try_again(pace: Pace, clock: HandClock) -> None:
    pace.note_answer(2.0)
    pace.note_bytes(MIB, 8.0)
    slow = pace.bytes_per_s
    clock.advance(60)
    assert slow < pace.bytes_per_s < 3 * slow
    clock.advance(1200)
    assert pace.bytes_per_s > 0.9 * PRIOR_BYTES_PER_S
    assert pace.wait_s == pytest.approx(PRIOR_WAIT_S, rel=0.01)


def test_the_node_that_was_asked_longest_ago_is_forgotten_first(clock: HandClock) -> None:
    records = NodeRecords(clock, random.Random(1))
    for number in range(NODES_MAX):
        records.of(f"node-{number}")
    records.of("node-0").fail("it was late", is_first=True)
    records.of("one more")
    assert len(records.all()) == NODES_MAX
    assert records.find("node-1") is None
    kept = records.find("node-0")
    assert kept is not None
    assert (kept.failures, kept.last_error) == (1, "it was late")
