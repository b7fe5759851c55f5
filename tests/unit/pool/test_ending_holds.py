"""Holds that end in bounded parts: each leaves the queue when the directory has it no more, however many chunks it had."""

import pytest

from kvpool.ids import HoldId
from kvpool.index.leases import ENDED_AT_ONCE, ENDED_COST
from kvpool.pool.readers.ending_holds import EndingHolds


class Directory:
    """Stands in for the native one: chunks of each hold."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = {HoldId(number): size for number, size in enumerate(sizes, 1)}

    def release_part(self, hold: HoldId, limit: int, now_ns: int) -> int:
        assert now_ns == 7
        ended = min(self.sizes.get(hold, 0), limit)
        if ended == self.sizes.get(hold, 0):
            self.sizes.pop(hold, None)
        else:
            self.sizes[hold] -= ended
        return ended

    def key_of(self, hold: HoldId, position: int) -> bytes:
        assert position == 0
        return bytes([self.sizes[hold] & 1]) * 32


@pytest.mark.parametrize("size", [1, ENDED_AT_ONCE - 1, ENDED_AT_ONCE, ENDED_AT_ONCE + 1, 3 * ENDED_AT_ONCE])
def test_a_hold_is_queued_for_as_long_as_the_directory_has_it(size: int) -> None:
    directory, called = Directory(size), []
    ending = EndingHolds(directory, lambda: called.append(1))  # type: ignore[arg-type]  # what it calls
    ending.release_holds([HoldId(1)], 7)
    for _ in range(5):
        assert len(ending) == len(directory.sizes)
        ending.release_holds([], 7)
    assert not directory.sizes
    assert not len(ending)
    assert len(called) == -(-size // ENDED_AT_ONCE) - 1


def test_many_small_holds_end_in_several_calls() -> None:
    """A call may come to its bound with the last chunk of a hold."""
    directory = Directory(*[1] * 900)
    ending = EndingHolds(directory, lambda: None)  # type: ignore[arg-type]  # what it calls
    ending.release_holds(list(directory.sizes), 7)
    calls = 1
    while len(ending):
        assert len(ending) == len(directory.sizes)
        ending.release_holds([], 7)
        calls += 1
    assert calls == -(-900 * (ENDED_COST + 1) // ENDED_AT_ONCE)


def test_without_a_backlog_all_end_at_once() -> None:
    directory = Directory(5, ENDED_AT_ONCE * 4, 1)
    ending = EndingHolds(directory, None)  # type: ignore[arg-type]  # what it calls
    ending.release_holds(list(directory.sizes), 7)
    assert not directory.sizes
    assert not len(ending)
