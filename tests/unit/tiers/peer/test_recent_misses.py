"""Tests of recent misses: a node that was named is not asked again at once, and soon it is; bounded."""

from kvpool.tiers.peer.recent_misses import MISSES_MAX, REMEMBERED_S, RecentMisses


class _Clock:
    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now


def test_a_miss_counts_for_a_moment_for_this_node_and_chunk() -> None:
    clock = _Clock()
    misses = RecentMisses(clock)
    misses.note_miss("one", b"a")
    assert misses.has("one", b"a")
    assert not misses.has("one", b"b")
    assert not misses.has("two", b"a")
    clock.now += int(REMEMBERED_S * 1e9) + 1
    assert not misses.has("one", b"a")


def test_the_oldest_of_too_many_is_forgotten() -> None:
    misses = RecentMisses(_Clock())
    for number in range(MISSES_MAX + 1):
        misses.note_miss("one", number.to_bytes(4, "big"))
    assert not misses.has("one", bytes(4))
    assert misses.has("one", (1).to_bytes(4, "big"))
