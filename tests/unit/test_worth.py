"""Loading against computing: the pure decisions, and the averages they are made with."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.types import Level
from kvpool_client.worth import (
    BYTES_TO_MEASURE,
    DRIFT,
    FIRST_GUESS,
    RATE_MAX,
    RATE_MIN,
    MovingRate,
    SpeedBook,
    Speeds,
    wait_limit_s,
    worthwhile_chunks,
)

DRAM, SSD = int(Level.DRAM), int(Level.SSD)
CHUNK_BYTES, CHUNK_TOKENS = 1 << 20, 256

hits = st.lists(st.sampled_from([DRAM, SSD]), max_size=60).map(bytes)
rates = st.floats(1e5, 1e11)
prefills = st.floats(1.0, 1e7)


def taken(levels: bytes, dram: float, ssd: float, prefill: float) -> int:
    speeds = Speeds({DRAM: dram, SSD: ssd}, prefill)
    return worthwhile_chunks(levels, chunk_bytes=CHUNK_BYTES, chunk_tokens=CHUNK_TOKENS, speeds=speeds)


def saved_s(levels: bytes, count: int, dram: float, ssd: float, prefill: float) -> float:
    loading = sum(CHUNK_BYTES / (dram if level == DRAM else ssd) for level in levels[:count])
    return count * CHUNK_TOKENS / prefill - loading


@given(hits, rates, rates, prefills)
@settings(deadline=None)
def test_no_other_prefix_saves_more_time(levels: bytes, dram: float, ssd: float, prefill: float) -> None:
    count = taken(levels, dram, ssd, prefill)
    assert 0 <= count <= len(levels)
    saved = saved_s(levels, count, dram, ssd, prefill)
    best = max(saved_s(levels, other, dram, ssd, prefill) for other in range(len(levels) + 1))
    assert saved == pytest.approx(best, abs=1e-9 + abs(best) * 1e-9)
    assert saved >= -1e-9


@given(hits, rates, rates, prefills, st.floats(1.0, 1e3))
@settings(deadline=None)
def test_quicker_loads_and_slower_computing_never_take_less(
    levels: bytes, dram: float, ssd: float, prefill: float, factor: float
) -> None:
    count = taken(levels, dram, ssd, prefill)
    assert taken(levels, dram * factor, ssd, prefill) >= count
    assert taken(levels, dram, ssd * factor, prefill) >= count
    assert taken(levels, dram, ssd, prefill / factor) >= count


@given(hits, prefills)
def test_everything_is_taken_where_loading_is_quicker_everywhere(levels: bytes, prefill: float) -> None:
    quick = CHUNK_BYTES / (CHUNK_TOKENS / prefill) * 1.01
    assert taken(levels, quick, quick, prefill) == len(levels)


@given(hits, prefills)
def test_nothing_is_taken_where_computing_is_quicker_everywhere(levels: bytes, prefill: float) -> None:
    slow = CHUNK_BYTES / (CHUNK_TOKENS / prefill) * 0.99
    assert taken(levels, slow, slow, prefill) == 0


def test_a_slow_piece_in_the_middle_is_taken_for_what_lies_behind_it() -> None:
    levels = bytes([DRAM, SSD, DRAM, DRAM, DRAM])
    # A chunk is computed in 0.1 s, read from DRAM in 0.01 s and from SSD in 0.25 s.
    assert taken(levels, CHUNK_BYTES / 0.01, CHUNK_BYTES / 0.25, CHUNK_TOKENS / 0.1) == 5
    assert taken(levels[:2], CHUNK_BYTES / 0.01, CHUNK_BYTES / 0.25, CHUNK_TOKENS / 0.1) == 1


def test_what_is_not_known_yet_is_taken() -> None:
    assert taken(bytes([SSD] * 7), 1.0, 1.0, 0.0) == 7


@given(st.integers(0, 1 << 20), st.floats(0.0, 1e7), st.floats(0.0, 10.0))
def test_a_wait_is_no_longer_than_computing_and_than_the_limit(tokens: int, prefill: float, longest: float) -> None:
    limit = wait_limit_s(tokens, speeds=Speeds({}, prefill), longest_s=longest)
    assert 0.0 <= limit <= longest
    if prefill:
        assert limit <= tokens / prefill


@given(st.lists(st.tuples(st.floats(1, 1e15), st.floats(1e-9, 1e6)), min_size=1, max_size=30))
def test_an_average_stays_within_its_bounds(samples: list[tuple[float, float]]) -> None:
    rate = MovingRate(1e9, least=RATE_MIN, most=RATE_MAX)
    for amount, seconds in samples:
        rate.add(amount, seconds)
        assert RATE_MIN <= rate.value <= RATE_MAX


def test_the_first_measurement_replaces_the_guess_and_others_move_it() -> None:
    rate = MovingRate(1e9, least=RATE_MIN, most=RATE_MAX)
    rate.add(1e8, 1.0)
    assert rate.value == 1e8
    rate.add(2e8, 1.0)
    assert 1e8 < rate.value < 2e8
    rate.add(0, 1.0)
    rate.add(1.0, 0.0)
    assert 1e8 < rate.value < 2e8


def test_a_tier_that_is_declined_is_tried_again_some_day() -> None:
    book = SpeedBook()
    levels = bytes([SSD] * 64)
    book.add_load(levels, CHUNK_BYTES, 64.0)
    slow = book.speeds().bytes_per_s[SSD]
    assert slow < FIRST_GUESS[Level.SSD] / 100
    needed = int(np.ceil(np.log(FIRST_GUESS[Level.SSD] / slow) / np.log(DRIFT)))
    for _ in range(needed - 1):
        book.decline(levels)
    assert slow < book.speeds().bytes_per_s[SSD] < FIRST_GUESS[Level.SSD]
    for _ in range(3):
        book.decline(levels)
    assert book.speeds().bytes_per_s[SSD] == FIRST_GUESS[Level.SSD]
    assert book.speeds().bytes_per_s[DRAM] == FIRST_GUESS[Level.DRAM]


def test_a_tier_quicker_than_the_guess_does_not_drift_down() -> None:
    book = SpeedBook()
    book.add_load(bytes([SSD] * 100), CHUNK_BYTES, 0.02)
    quick = book.speeds().bytes_per_s[SSD]
    assert quick > FIRST_GUESS[Level.SSD]
    book.decline(bytes([SSD]))
    assert book.speeds().bytes_per_s[SSD] == quick


def test_the_slowest_tier_answers_for_the_time_of_a_mixed_load() -> None:
    book = SpeedBook()
    book.add_load(bytes([DRAM] * 40 + [SSD] * 10), CHUNK_BYTES, 1.0)
    assert book.speeds().bytes_per_s[DRAM] == FIRST_GUESS[Level.DRAM]
    assert book.speeds().bytes_per_s[SSD] == pytest.approx(10 * CHUNK_BYTES, rel=0.05)


def test_small_loads_measure_nothing() -> None:
    book = SpeedBook()
    book.add_load(bytes([SSD]), BYTES_TO_MEASURE - 1, 5.0)
    book.add_load(b"", CHUNK_BYTES, 5.0)
    assert book.speeds().bytes_per_s == {int(level): guess for level, guess in FIRST_GUESS.items()}


def test_prefill_is_unknown_until_it_was_seen() -> None:
    book = SpeedBook()
    assert book.speeds().prefill_tokens_per_s == 0
    book.add_prefill(1000, 0.5)
    assert book.speeds().prefill_tokens_per_s == 2000
