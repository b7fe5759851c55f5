"""Loading against computing: the pure decisions, and the averages they are made with."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.states import Level
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.engines.load_cost import (
    BYTES_TO_MEASURE,
    FIRST_GUESS,
    FIRST_PROBE_S,
    LAST_PROBE_S,
    PROBE_BYTES,
    RATE_MAX,
    RATE_MIN,
    SETUP_MAX_S,
    FittedTime,
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
    rate = MedianRate(least=RATE_MIN, most=RATE_MAX)
    assert rate.value == 0
    for amount, seconds in samples:
        rate.add_measurement(amount, seconds)
        assert RATE_MIN <= rate.value <= RATE_MAX


def test_invalid_measurements_change_no_rate() -> None:
    rate, tier = MedianRate(least=RATE_MIN, most=RATE_MAX), new_tier()
    for amount, seconds in ((0, 1.0), (1.0, 0.0)):
        rate.add_measurement(amount, seconds)
        tier.add_measurement(amount, seconds)
    assert rate.value == 0
    assert (tier.rate, tier.setup_s) == (1e9, 0)


def new_tier(guess: float = 1e9) -> FittedTime:
    return FittedTime(guess, least=RATE_MIN, most=RATE_MAX)


def seconds_of(tier: FittedTime, size: float) -> float:
    return tier.setup_s + size / tier.rate


MIB = 1 << 20
# In any order, any two of them apart.
sizes_apart = st.permutations([size * MIB for size in (1, 2, 4, 8, 16)])
true_rates = st.floats(2e7, 2e10)
true_setups = st.floats(0.0, SETUP_MAX_S * 0.99)


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e6)), min_size=1, max_size=30), st.sampled_from([0, 1e9])
)
@SOME
def test_a_set_up_is_never_negative_nor_beyond_its_bound(samples: list[tuple[float, float]], guess: float) -> None:
    tier = new_tier(guess)
    for amount, seconds in samples:
        tier.add_measurement(amount, seconds)
        assert 0 <= tier.setup_s <= SETUP_MAX_S
        assert RATE_MIN * 0.999 <= tier.rate <= RATE_MAX * 1.001


@given(sizes_apart, true_rates, true_setups, st.sampled_from([0, 1e9]))
@SOME
def test_loads_of_different_sizes_show_the_set_up_and_the_rate(
    sizes: list[int], rate: float, setup_s: float, guess: float
) -> None:
    tier = new_tier(guess)
    for size in sizes:
        tier.add_measurement(size, setup_s + size / rate)
    assert tier.rate == pytest.approx(rate, rel=1e-6)
    assert tier.setup_s == pytest.approx(setup_s, abs=1e-6)


@given(sizes_apart, true_rates, true_setups, st.integers(0, 4), st.floats(0.0, 1e3))
@SOME
def test_one_stall_moves_neither(sizes: list[int], rate: float, setup_s: float, when: int, stall_s: float) -> None:
    tier = new_tier()
    for size in sizes:
        tier.add_measurement(size, setup_s + size / rate)
    for place, size in enumerate(sizes):
        tier.add_measurement(size, setup_s + size / rate + (stall_s if place == when else 0.0))
        assert tier.rate == pytest.approx(rate, rel=1e-6)
        assert tier.setup_s == pytest.approx(setup_s, abs=1e-6)


@given(sizes_apart, st.floats(1e9, 2e10), st.floats(0.0, 0.02), st.integers(0, 4), st.floats(0.0, 1e3))
@SOME
def test_a_stall_among_the_very_first_loads_makes_no_tier_slow(
    sizes: list[int], rate: float, setup_s: float, when: int, stall_s: float
) -> None:
    tier = new_tier(1e9)
    for place, size in enumerate(sizes):
        tier.add_measurement(size, setup_s + size / rate + (stall_s if place == when else 0.0))
        assert tier.setup_s <= 0.04, place
        assert seconds_of(tier, 64 * MIB) <= 0.02 + 64 * MIB / 5e8, place


@given(st.integers(MIB, 64 * MIB), true_rates, true_setups, st.integers(2, 9))
@SOME
def test_loads_of_one_size_show_how_long_that_size_takes(size: int, rate: float, setup_s: float, count: int) -> None:
    tier, took_s = new_tier(), setup_s + size / rate
    for _ in range(count):
        tier.add_measurement(size, took_s)
    if took_s > size / 1e9 or count >= 3:  # the guess counts against two that are faster
        assert seconds_of(tier, size) == pytest.approx(took_s)


@pytest.mark.parametrize(("took_s", "is_fast"), [(0.002, False), (0.005, False), (0.0107, False), (0.0002, True)])
def test_small_loads_alone_claim_no_other_speed_than_they_prove(took_s: float, *, is_fast: bool) -> None:
    """One MiB in 2 to 11 ms may be a set-up alone; in 0.2 ms it is 5 GB/s."""
    tier = new_tier(1e9)
    for _ in range(9):
        tier.add_measurement(MIB, took_s)
    assert tier.rate == pytest.approx(MIB / took_s if is_fast else 1e9)


def test_small_loads_do_not_drop_what_large_ones_have_shown() -> None:
    tier = new_tier(4e9)
    for size in (8, 16, 32, 64, 128):
        tier.add_measurement(size * MIB, 0.005 + size * MIB / 20e6)
    for _ in range(20):
        tier.add_measurement(MIB, 0.005 + MIB / 20e6)
    assert tier.rate == pytest.approx(20e6)
    assert tier.setup_s == pytest.approx(0.005)


@given(sizes_apart, st.integers(0, 20), st.floats(2e7, 2e8))
@SOME
def test_three_slow_loads_change_the_rate(sizes: list[int], before: int, slow: float) -> None:
    """What they took beyond the longest set-up counts for their bytes."""
    tier = new_tier()
    for number in range(before):
        tier.add_measurement(sizes[number % 5] * 64, sizes[number % 5] * 64 / 1e9)
    for size in sizes[:3]:
        tier.add_measurement(size * 64, size * 64 / slow)
    assert tier.rate < 2 * slow


def test_a_tier_that_has_become_fast_is_shown_by_three_loads() -> None:
    tier = new_tier()
    for seconds in [3.2] * 5 + [0.032] * 3:
        tier.add_measurement(64 * MIB, seconds)
    assert seconds_of(tier, 64 * MIB) == pytest.approx(0.032)


def test_without_a_guess_all_time_counts_until_amounts_differ() -> None:
    prefill = new_tier(0)
    assert (prefill.rate, prefill.count) == (0, 0)
    for _ in range(3):
        prefill.add_measurement(1000 * MIB, 0.05)
        assert prefill.rate == pytest.approx(1000 * MIB / 0.05)
        assert prefill.setup_s == pytest.approx(0)


def test_a_new_tier_counts_as_slow_after_two_loads() -> None:
    estimator = RateEstimator()
    for _ in range(2):
        assert estimator.rates().bytes_per_s[SSD] == pytest.approx(FIRST_GUESS[Level.SSD])
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


def test_a_small_hit_measures_a_declined_tier_where_no_larger_one_comes() -> None:
    estimator = declining_book()
    small = SLOW_HIT[: PROBED - 1]
    assert take(estimator, small, 0.0) == 0
    assert take(estimator, small, 2 * FIRST_PROBE_S - 1) == 0
    assert take(estimator, small, 2 * FIRST_PROBE_S) == PROBED - 1
    estimator.add_load(SLOW_HIT[:1], CHUNK_BYTES // 4, 0.002)
    assert take(estimator, SLOW_HIT, 2 * FIRST_PROBE_S) == len(SLOW_HIT)


def test_a_measurement_that_is_slow_again_leaves_what_is_known() -> None:
    estimator = declining_book()
    assert take(estimator, SLOW_HIT, 0.0) == 0
    assert take(estimator, SLOW_HIT, FIRST_PROBE_S) == PROBED
    estimator.add_load(SLOW_HIT[:PROBED], CHUNK_BYTES, float(PROBED))
    assert estimator.rates().bytes_per_s[SSD] == pytest.approx(CHUNK_BYTES, rel=0.03)
    assert take(estimator, SLOW_HIT * 4, FIRST_PROBE_S) == 0


def test_a_hit_that_may_not_be_cut_is_loaded_whole_or_not_at_all() -> None:
    estimator = declining_book()
    for _ in range(5):
        estimator.add_load(bytes([DRAM] * 64), CHUNK_BYTES, 64 * 0.001)

    def taken(levels: bytes, at_s: float) -> int:
        now_ns = int(at_s * 1e9)
        return estimator.plan_load(
            levels, chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS, now_ns=now_ns, may_cut=False
        )

    # A chunk of DRAM saves 0.1 s, one of the SSD costs 0.9 s.
    assert taken(bytes([DRAM] * 20 + [SSD]), 0.0) == 21
    assert taken(bytes([DRAM] * 5 + [SSD]), 0.0) == 0
    assert taken(SLOW_HIT, 0.0) == 0
    assert taken(SLOW_HIT, 2 * FIRST_PROBE_S) == len(SLOW_HIT), "to measure"
    assert taken(SLOW_HIT, 2 * FIRST_PROBE_S) == 0


def test_a_load_that_saves_less_than_its_set_up_is_declined() -> None:
    rates = Rates({DRAM: 1e9, SSD: 1e9}, 10_000, {DRAM: 0.05, SSD: 0.06})

    def taken(levels: bytes) -> int:
        return chunks_to_load(levels, chunk_bytes=1_000_000, chunk_tokens=110, rates=rates)

    # A chunk saves 10 ms; a load has one set-up, the longer one of its tiers.
    assert taken(bytes([DRAM] * 4)) == 0
    assert taken(bytes([DRAM] * 6)) == 6
    assert taken(bytes([DRAM] * 3 + [SSD] * 4)) == 7
    assert taken(bytes([SSD] * 3 + [DRAM] * 2)) == 0


def test_the_time_of_a_mixed_load_counts_for_its_slowest_tier() -> None:
    estimator = RateEstimator()
    for _ in range(2):
        estimator.add_load(bytes([DRAM] * 40 + [SSD] * 10), CHUNK_BYTES, 1.0)
    assert estimator.rates().bytes_per_s[DRAM] == FIRST_GUESS[Level.DRAM]
    # 40 MiB take 10 ms, 10 MiB and the set-up the rest.
    slow_s = estimator.rates().setup_s[SSD] + 10 * CHUNK_BYTES / estimator.rates().bytes_per_s[SSD]
    assert slow_s == pytest.approx(0.99, abs=0.001)


def test_small_loads_measure_nothing() -> None:
    estimator = RateEstimator()
    estimator.add_load(bytes([SSD]), BYTES_TO_MEASURE - 1, 5.0)
    estimator.add_load(b"", CHUNK_BYTES, 5.0)
    assert estimator.rates().bytes_per_s == {int(level): guess for level, guess in FIRST_GUESS.items()}


def test_the_prefill_rate_is_unknown_until_measured() -> None:
    estimator = RateEstimator()
    assert estimator.rates().prefill_tokens_per_s == 0
    estimator.add_prefill(1000, 0.5)
    assert estimator.rates().prefill_tokens_per_s == pytest.approx(2000)


def test_an_engine_that_has_hardly_prefilled_computes_what_it_has_computed_at_least() -> None:
    estimator = RateEstimator()
    estimator.add_least_prefill(70, 0.1)
    assert estimator.rates().prefill_tokens_per_s == pytest.approx(700)
    estimator.add_prefill(512, 5.12)  # its first step was slow
    assert estimator.rates().prefill_tokens_per_s == pytest.approx(700)
    for _ in range(2):
        estimator.add_prefill(512, 1.024)
    assert estimator.rates().prefill_tokens_per_s == pytest.approx(500)


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
