"""How many bad chunks in how short a time put the SSD tier to rest."""

from kvpool.clock import NS_PER_S
from kvpool.tiers.ssd_corruption import CHUNKS, WINDOW_S, CorruptionGuard


def test_single_bad_chunks_are_misses() -> None:
    guard = CorruptionGuard()
    times = [number * (WINDOW_S // (CHUNKS - 1) + 1) * NS_PER_S for number in range(20)]
    assert [guard.note(now_ns) for now_ns in times] == [False] * 20
    assert guard.problems() == []


def test_several_within_a_minute_are_a_problem_until_the_tier_is_tried_again() -> None:
    guard = CorruptionGuard()
    assert [guard.note(number) for number in range(CHUNKS)] == [False] * (CHUNKS - 1) + [True]
    assert guard.problems() != []
    assert not guard.note(CHUNKS), "it counts anew"
    guard.end_rest()
    assert guard.problems() == []
