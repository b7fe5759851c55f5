"""Loading against computing: the pure decisions, and the averages they are made with."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.types import Level
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.engines.load_cost import (
    BYTES_TO_MEASURE,
    FIRST_GUESS,
    FIRST_PROBE_S,
    LAST_PROBE_S,
    PROBE_BYTES,
    RATE_MAX,
    RATE_MIN,
    MedianRate,
    RateEstimator,
    Rates,
    chunks_to_load,
    wait_limit_s,
)

DRAM, SSD = int(Level.DRAM), int(Level.SSD)
CHUNK_BYTES, CHUNK_TOKENS = 1 << 20, 256

SOME = settings(max_examples=30, deadline=None)

hits = st.lists(st.sampled_from([DRAM, SSD]), max_size=60).map(bytes)
rates = st.floats(1e5, 1e11)
prefills = st.floats(1.0, 1e7)


def taken(levels: bytes, dram: float, ssd: float, prefill: float) -> int:
    rates = Rates({DRAM: dram, SSD: ssd}, prefill)
    return chunks_to_load(levels, chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS, rates=rates)


def saved_s(levels: bytes, count: int, dram: float, ssd: float, prefill: float) -> float:
    loading = sum(CHUNK_BYTES / (dram if level == DRAM else ssd) for level in levels[:count])
    return count * CHUNK_TOKENS / prefill - loading


@given(hits, rates, rates, prefills)
@SOME
def test_the_chosen_prefix_saves_the_most_time(levels: bytes, dram: float, ssd: float, prefill: float) -> None:
    count = taken(levels, dram, ssd, prefill)
    assert 0 <= count <= len(levels)
    saved = saved_s(levels, count, dram, ssd, prefill)
    best = max(saved_s(levels, other, dram, ssd, prefill) for other in range(len(levels) + 1))
    assert saved == pytest.approx(best, abs=1e-9 + abs(best) * 1e-9)
    assert saved >= -1e-9


@given(hits, rates, rates, prefills, st.floats(1.0, 1e3))
@SOME
def test_faster_loads_or_slower_computing_never_load_less(
    levels: bytes, dram: float, ssd: float, prefill: float, factor: float
) -> None:
    count = taken(levels, dram, ssd, prefill)
    assert taken(levels, dram * factor, ssd, prefill) >= count
    assert taken(levels, dram, ssd * factor, prefill) >= count
    assert taken(levels, dram, ssd, prefill / factor) >= count


@given(hits, prefills)
@SOME
def test_every_chunk_is_loaded_where_loading_is_always_faster(levels: bytes, prefill: float) -> None:
    quick = CHUNK_BYTES / (CHUNK_TOKENS / prefill) * 1.01
    assert taken(levels, quick, quick, prefill) == len(levels)


@given(hits, prefills)
@SOME
def test_no_chunk_is_loaded_where_computing_is_always_faster(levels: bytes, prefill: float) -> None:
    slow = CHUNK_BYTES / (CHUNK_TOKENS / prefill) * 0.99
    assert taken(levels, slow, slow, prefill) == 0


def test_a_slow_part_in_the_middle_is_loaded_for_the_fast_part_behind_it() -> None:
    levels = bytes([DRAM, SSD, DRAM, DRAM, DRAM])
    # A chunk is computed in 0.1 s, read from DRAM in 0.01 s and from SSD in 0.25 s.
    assert taken(levels, CHUNK_BYTES / 0.01, CHUNK_BYTES / 0.25, CHUNK_TOKENS / 0.1) == 5
    assert taken(levels[:2], CHUNK_BYTES / 0.01, CHUNK_BYTES / 0.25, CHUNK_TOKENS / 0.1) == 1


def test_chunks_are_loaded_while_no_rate_is_known() -> None:
    assert taken(bytes([SSD] * 7), 1.0, 1.0, 0.0) == 7


@given(st.integers(0, 1 << 20), st.floats(0.0, 1e7), st.floats(0.0, 10.0))
@SOME
def test_a_wait_is_no_longer_than_computing_and_than_the_limit(tokens: int, prefill: float, longest: float) -> None:
    limit = wait_limit_s(tokens, rates=Rates({}, prefill), longest_s=longest)
    assert 0.0 <= limit <= longest
    if prefill:
        assert limit <= tokens / prefill


@given(st.lists(st.tuples(st.floats(1, 1e15), st.floats(1e-9, 1e6)), min_size=1, max_size=30))
@SOME
def test_a_rate_stays_within_its_bounds(samples: list[tuple[float, float]]) -> None:
    rate = MedianRate(1e9, least=RATE_MIN, most=RATE_MAX)
    for amount, seconds in samples:
        rate.add(amount, seconds)
        assert RATE_MIN <= rate.value <= RATE_MAX


def test_invalid_measurements_change_no_rate() -> None:
    rate = MedianRate(1e9, least=RATE_MIN, most=RATE_MAX)
    rate.add(0, 1.0)
    rate.add(1.0, 0.0)
    assert rate.value == 1e9


@given(st.lists(st.floats(0.9, 1.1), max_size=20), st.floats(1e-6, 0.5), st.integers(0, 20))
@SOME
def test_one_stalled_load_declines_no_tier(steady: list[float], stalled: float, after: int) -> None:
    """Whenever it comes, the very first load included."""
    rate = MedianRate(1e9, least=RATE_MIN, most=RATE_MAX)
    for number, factor in enumerate([*steady[:after], stalled, *steady[after:]]):
        rate.add(1e9 * factor, 1.0)
        assert rate.value >= 0.9e9, number


@given(st.integers(0, 20), st.floats(1e-3, 0.5))
@SOME
def test_three_slow_loads_change_the_rate(before: int, slow: float) -> None:
    rate = MedianRate(1e9, least=RATE_MIN, most=RATE_MAX)
    for factor in [1.0] * before + [slow] * 3:
        rate.add(1e9 * factor, 1.0)
    assert rate.value == pytest.approx(1e9 * slow)


def test_a_new_tier_counts_as_slow_after_two_loads() -> None:
    estimator = RateEstimator()
    for _ in range(2):
        assert estimator.rates().bytes_per_s[SSD] == FIRST_GUESS[Level.SSD]
        estimator.add_load(SLOW_HIT, CHUNK_BYTES, 64.0)
    assert estimator.rates().bytes_per_s[SSD] < FIRST_GUESS[Level.SSD] / 100


SLOW_HIT = bytes([SSD] * 64)
PROBED = PROBE_BYTES // CHUNK_BYTES


def declining_book() -> RateEstimator:
    """It knows an engine that computes a chunk in 0.1 s, and an SSD that brings one in a second."""
    estimator = RateEstimator()
    estimator.add_prefill(CHUNK_TOKENS, 0.1)
    for _ in range(2):
        estimator.add_load(SLOW_HIT, CHUNK_BYTES, 64.0)
    return estimator


def take(estimator: RateEstimator, levels: bytes, at_s: float) -> int:
    return estimator.plan_load(levels, chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS, now_ns=int(at_s * 1e9))


def probes_within(estimator: RateEstimator, seconds: int, *, probe_s: float) -> list[int]:
    """The seconds at which a hit asked for every second was taken, in part, to measure; each took `probe_s`."""
    at = []
    for second in range(seconds):
        taken = take(estimator, SLOW_HIT, second)
        assert taken in (0, PROBED)
        if taken:
            at.append(second)
            estimator.add_load(SLOW_HIT[:taken], CHUNK_BYTES, probe_s)
    return at


def test_a_declined_tier_that_stays_slow_is_measured_less_and_less_often_by_part_of_a_hit() -> None:
    at = probes_within(declining_book(), 4000, probe_s=float(PROBED))
    assert at[0] == FIRST_PROBE_S
    gaps = np.diff(at)
    assert list(gaps) == [min(FIRST_PROBE_S * 2 ** (number + 1), LAST_PROBE_S) for number in range(len(gaps))]
    assert gaps[-1] == LAST_PROBE_S


def test_a_declined_tier_that_has_become_fast_is_loaded_again_after_one_measurement() -> None:
    estimator = declining_book()
    assert take(estimator, SLOW_HIT, 0.0) == 0
    assert take(estimator, SLOW_HIT, FIRST_PROBE_S) == PROBED
    estimator.add_load(SLOW_HIT[:PROBED], CHUNK_BYTES, 0.02)
    assert take(estimator, SLOW_HIT, FIRST_PROBE_S) == len(SLOW_HIT)


def test_a_measurement_that_never_ended_is_repeated() -> None:
    estimator = declining_book()
    assert take(estimator, SLOW_HIT, 0.0) == 0
    assert take(estimator, SLOW_HIT, FIRST_PROBE_S) == PROBED
    assert take(estimator, SLOW_HIT, 2 * FIRST_PROBE_S) == 0
    assert take(estimator, SLOW_HIT, 3 * FIRST_PROBE_S) == PROBED


def test_chunks_before_the_declined_tier_are_loaded_with_the_measurement() -> None:
    estimator = declining_book()
    levels = bytes([DRAM] * 3) + SLOW_HIT
    assert take(estimator, levels, 0.0) == 3
    assert take(estimator, levels, FIRST_PROBE_S) == 3 + PROBED
    assert take(estimator, levels[: 3 + PROBED - 1], 100 * FIRST_PROBE_S) == 3


def test_the_time_of_a_mixed_load_counts_for_its_slowest_tier() -> None:
    estimator = RateEstimator()
    for _ in range(2):
        estimator.add_load(bytes([DRAM] * 40 + [SSD] * 10), CHUNK_BYTES, 1.0)
    assert estimator.rates().bytes_per_s[DRAM] == FIRST_GUESS[Level.DRAM]
    assert estimator.rates().bytes_per_s[SSD] == pytest.approx(10 * CHUNK_BYTES, rel=0.05)


def test_small_loads_measure_nothing() -> None:
    estimator = RateEstimator()
    estimator.add_load(bytes([SSD]), BYTES_TO_MEASURE - 1, 5.0)
    estimator.add_load(b"", CHUNK_BYTES, 5.0)
    assert estimator.rates().bytes_per_s == {int(level): guess for level, guess in FIRST_GUESS.items()}


def test_the_prefill_rate_is_unknown_until_measured() -> None:
    estimator = RateEstimator()
    assert estimator.rates().prefill_tokens_per_s == 0
    estimator.add_prefill(1000, 0.5)
    assert estimator.rates().prefill_tokens_per_s == 2000


def test_a_slow_peer_is_declined_and_a_fast_one_loaded_from_whatever_others_were() -> None:
    estimator = RateEstimator()
    estimator.add_prefill(10_000, 1.0)  # a chunk of 256 tokens in 25.6 ms
    levels = bytes([DRAM] * 2 + [Level.PEER] * 8)

    def planned(pace: PeerPace | None) -> int:
        return estimator.plan_load(levels, chunk_bytes=CHUNK_BYTES, chunk_tokens=256, now_ns=0, peer_pace=pace)

    assert planned(None) == 10
    assert planned(PeerPace(1e9, 0.001)) == 10
    assert planned(PeerPace(20e6, 0.001)) == 2
    # Eight chunks save 200 ms.
    assert planned(PeerPace(1e9, 0.15)) == 10
    assert planned(PeerPace(1e9, 0.25)) == 2
    for _ in range(5):
        estimator.add_load(bytes([Level.PEER] * 8), CHUNK_BYTES, 8.0)
    assert planned(None) == 2
    assert planned(PeerPace(1e9, 0.001)) == 10
