"""Tests of recent misses: a node that was named is not asked again at once, and soon it is; bounded."""

from kvpool.tiers.peer.recent_misses import MISSES_MAX, REMEMBERED_S, RecentMisses
from tests.rigs.clock import HandClock


def test_a_miss_counts_for_a_moment_for_this_node_and_chunk() -> None:
    clock = HandClock()
    misses = RecentMisses(clock)
    misses.note_miss("one", b"a")
    assert misses.has("one", b"a")
    assert not misses.has("one", b"b")
    assert not misses.has("two", b"a")
    clock.advance(REMEMBERED_S + 0.001)
    assert not misses.has("one", b"a")


def test_the_oldest_of_too_many_is_forgotten() -> None:
    misses = RecentMisses(HandClock())
    for number in range(MISSES_MAX + 1):
        misses.note_miss("one", number.to_bytes(4, "big"))
    assert not misses.has("one", bytes(4))
    assert misses.has("one", (1).to_bytes(4, "big"))
