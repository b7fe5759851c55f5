"""The number of bad chunks within a time that suspends the SSD tier."""

from kvpool.clock import NS_PER_S
from kvpool.tiers.ssd.corruption import CHUNKS, WINDOW_S, CorruptionGuard
from kvpool.tiers.ssd.status import SsdStatus

BAD = SsdStatus.BAD_CHECKSUM


def test_single_bad_chunks_are_misses() -> None:
    guard = CorruptionGuard()
    times = [number * (WINDOW_S // (CHUNKS - 1) + 1) * NS_PER_S for number in range(20)]
    assert [guard.note_result(BAD, 1, now_ns) for now_ns in times] == [False] * 20
    assert guard.problems() == []


def test_several_within_a_minute_are_a_problem_until_the_tier_is_tried_again() -> None:
    guard = CorruptionGuard()
    assert [guard.note_result(BAD, 1, number) for number in range(CHUNKS)] == [False] * (CHUNKS - 1) + [True]
    assert guard.problems() != []
    assert not guard.note_result(BAD, 1, CHUNKS), "it counts anew"
    guard.end_rest()
    assert guard.problems() == []


def test_damage_that_a_crash_may_have_left_does_not_count() -> None:
    guard = CorruptionGuard()
    guard.begin_life(1000)
    found = [(status, generation) for status in SsdStatus for generation in (0, 1, 1000, 1001)]
    harmless = [one for one in found if one != (BAD, 1001) and one[0] != SsdStatus.BAD_WRITE]
    assert not any(guard.note_result(*one, 1) for one in harmless * CHUNKS)
    assert [
        guard.note_result(BAD, 1001, 2),
        guard.note_result(SsdStatus.BAD_WRITE, 0, 2),
        guard.note_result(BAD, 1001, 2),
    ] == [False, False, True]
