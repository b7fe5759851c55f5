"""A stopwatch: the oldest of the work under way, and nothing when all has ended."""

from kvpool.clock import Stopwatch
from tests.rigs.clock import HandClock


def test_the_work_that_was_begun_first_counts() -> None:
    clock = HandClock(0)
    watch = Stopwatch(clock)
    assert watch.elapsed_s == 0.0
    first = watch.running()
    with first:
        clock.now_s = 5
        with watch.running():
            clock.now_s = 7
            assert watch.elapsed_s == 7.0
        assert watch.elapsed_s == 7.0
    assert watch.elapsed_s == 0.0
