"""A stopwatch: the oldest of the work under way, and nothing when all has ended."""

from kvpool.clock import NS_PER_S, Stopwatch


class _Clock:
    seconds = 0

    def now_ns(self) -> int:
        return self.seconds * NS_PER_S


def test_the_work_that_was_begun_first_counts() -> None:
    clock = _Clock()
    watch = Stopwatch(clock)
    assert watch.elapsed_s == 0.0
    first = watch.running()
    with first:
        clock.seconds = 5
        with watch.running():
            clock.seconds = 7
            assert watch.elapsed_s == 7.0
        assert watch.elapsed_s == 7.0
    assert watch.elapsed_s == 0.0
