"""Wake-ups of the control thread for priorities that expire: in time, not too often, and never without need."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpool.pool.deadlines import BACKLOG_NS, PRIORITY_EXPIRY_INTERVAL_NS, PriorityExpiry

SECOND_NS = 10**9


class FakeTimer:
    def __init__(self, at_ns: int, callback: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """A loop and a clock in one."""

    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []
        self.time_ns = 100 * SECOND_NS

    def now_ns(self) -> int:
        return self.time_ns

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        assert delay_s >= 0
        self.timers.append(FakeTimer(self.time_ns + round(delay_s * SECOND_NS), callback))
        return self.timers[-1]

    @property
    def waiting(self) -> list[FakeTimer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def run_next(self) -> None:
        (timer,) = self.waiting
        self.timers.clear()
        self.time_ns = max(self.time_ns, timer.at_ns)
        timer.callback()


class FakeDirectory:
    """PriorityExpiry at given times, `per_tick` of them in a call."""

    def __init__(self, *due_ns: int, per_tick: int = 1000) -> None:
        self.due_ns = sorted(due_ns)
        self.per_tick = per_tick
        self.ticks = 0
        self.remembered = 0

    @property
    def directories(self) -> "list[FakeDirectory]":
        """As the tiering that has it alone."""
        return [self]

    def next_expiry_ns(self) -> int | None:
        return self.due_ns[0] if self.due_ns else None

    def expire_retention(self, now_ns: int) -> None:
        self.ticks += 1
        over = [due for due in self.due_ns if due <= now_ns][: self.per_tick]
        self.due_ns = self.due_ns[len(over) :]

    def keep_up(self) -> None:
        self.remembered += 1


class NoTiers:
    """A tiering without a lower tier."""

    directories: tuple[FakeDirectory, ...] = ()

    def keep_up(self) -> None:
        """Nobody has anything to note."""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    made = FakeLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def expiry_of(loop: FakeLoop, memory: FakeDirectory, files: FakeDirectory | None = None) -> PriorityExpiry:
    below = NoTiers() if files is None else files
    return PriorityExpiry(cast(Any, memory), cast(Any, below), loop)


def test_nothing_is_scheduled_while_no_priority_can_expire(loop: FakeLoop) -> None:
    memory, files = FakeDirectory(), FakeDirectory()
    expiry_of(loop, memory, files).look()
    assert loop.waiting == []


def test_a_tick_comes_at_the_first_expiry_of_either_tier(loop: FakeLoop) -> None:
    start = loop.time_ns
    memory, files = FakeDirectory(start + 9 * SECOND_NS), FakeDirectory(start + 3 * SECOND_NS)
    expiry_of(loop, memory, files).look()
    assert [timer.at_ns for timer in loop.waiting] == [start + 3 * SECOND_NS]
    loop.run_next()
    assert (files.due_ns, files.remembered) == ([], 1)
    assert [timer.at_ns for timer in loop.waiting] == [start + 9 * SECOND_NS]
    loop.run_next()
    assert loop.waiting == []
    assert memory.ticks == files.ticks == 2


def test_an_earlier_tick_replaces_a_later_one_and_not_the_reverse(loop: FakeLoop) -> None:
    start = loop.time_ns
    memory = FakeDirectory(start + 9 * SECOND_NS)
    expiry = expiry_of(loop, memory)
    expiry.look()
    memory.due_ns.insert(0, start + SECOND_NS)
    expiry.look()
    expiry.look()
    assert [timer.at_ns for timer in loop.waiting] == [start + SECOND_NS]
    memory.due_ns = [start + 5 * SECOND_NS]
    expiry.look()
    assert [timer.at_ns for timer in loop.waiting] == [start + SECOND_NS]


def test_many_close_expiries_do_not_wake_the_thread_for_each(loop: FakeLoop) -> None:
    start = loop.time_ns
    memory = FakeDirectory(*(start + SECOND_NS + number * 10_000_000 for number in range(500)))
    expiry_of(loop, memory).look()
    while loop.waiting:
        loop.run_next()
    assert memory.due_ns == []
    assert memory.ticks <= 5 * SECOND_NS // PRIORITY_EXPIRY_INTERVAL_NS + 2
    assert loop.time_ns <= start + 6 * SECOND_NS + PRIORITY_EXPIRY_INTERVAL_NS


def test_expiries_beyond_one_tick_are_done_by_the_next_ones_soon(loop: FakeLoop) -> None:
    due_ns = loop.time_ns + SECOND_NS
    memory = FakeDirectory(*[due_ns] * 1000, per_tick=256)
    expiry_of(loop, memory).look()
    while loop.waiting:
        loop.run_next()
    assert memory.due_ns == []
    assert loop.time_ns <= due_ns + 4 * BACKLOG_NS


def test_a_cancelled_tick_does_not_come(loop: FakeLoop) -> None:
    expiry = expiry_of(loop, FakeDirectory(loop.time_ns + SECOND_NS))
    expiry.look()
    expiry.cancel()
    assert loop.waiting == []
