"""Suspension of a tier and its next probe, on a loop whose time the test sets."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from kvpool.tiers.base import TierState
from kvpool.tiers.ssd.corruption import CHUNKS, REST_S, CorruptionGuard
from kvpool.tiers.ssd.status import SsdStatus
from kvpool.tiers.ssd.tier import SsdTier
from kvpool.tiers.ssd.watch import FIRST_PAUSE_S, LAST_PAUSE_S, LOOK_S, READS, WRITES, SsdWatch


@dataclass
class FakeTimer:
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class FakeLoop:
    """`call_later` alone."""

    now_s: float = 0.0
    waiting: list[tuple[float, int, FakeTimer, Callable[[], None]]] = field(default_factory=list)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        heapq.heappush(self.waiting, (self.now_s + delay_s, id(timer), timer, call))
        return timer

    def time(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        end = self.now_s + seconds
        while self.waiting and self.waiting[0][0] <= end:
            due, _, timer, call = heapq.heappop(self.waiting)
            self.now_s = max(self.now_s, due)
            if not timer.is_cancelled:
                call()
        self.now_s = end


@dataclass
class FakeTier:
    """A tier whose disk was asked at `asked_s` and has not answered, or has nothing to answer (None)."""

    loop: FakeLoop
    stall_s: float = 10.0
    asked_s: float | None = None
    rests: bool = False
    suspended: tuple[str, ...] = ()
    corruption: CorruptionGuard = field(default_factory=CorruptionGuard)

    tries: list[float] = field(default_factory=list)
    is_well: bool = True

    @property
    def has_jobs(self) -> bool:
        return self.asked_s is not None

    def try_again(self) -> None:
        self.tries.append(self.loop.now_s)
        self.rests = not self.is_well

    def become(self, state: TierState, reason: str = "") -> None:
        assert state == TierState.READONLY
        assert "were not what had been written" in reason
        self.rests = True

    @property
    def unanswered_s(self) -> float:
        return 0.0 if self.asked_s is None else self.loop.now_s - self.asked_s

    @property
    def is_answering(self) -> bool:
        return self.unanswered_s < 1.0

    @property
    def has_stalled(self) -> bool:
        return not self.rests and self.unanswered_s >= self.stall_s

    @property
    def can_be_tried_again(self) -> bool:
        return self.rests

    def rest_stalled(self) -> None:
        self.rests = True


class Watched:
    """A watch over a fake tier; `tier.tries` are the times at which it was tried again."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.tier = FakeTier(self.loop)
        self.watch = SsdWatch(cast(SsdTier, self.tier))

    def start(self) -> None:
        self.watch.start(self.loop)  # type: ignore[arg-type]  # what the watch asks of a loop

    def ask(self) -> None:
        self.tier.asked_s = self.loop.now_s
        self.watch.note_begun()


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.start()
    return watched


def test_a_tier_with_an_unresponsive_disk_is_suspended_until_it_answers(watched: Watched) -> None:
    watched.ask()
    watched.loop.pass_time(10.0)
    assert not watched.tier.rests
    watched.loop.pass_time(2 * LOOK_S)
    assert watched.tier.rests
    watched.loop.pass_time(1000.0)
    assert watched.tier.tries == [], "it is not tried while it hangs"
    watched.tier.asked_s = None
    watched.loop.pass_time(FIRST_PAUSE_S)
    assert len(watched.tier.tries) == 1
    assert not watched.tier.rests


def test_a_daemon_that_was_stopped_does_not_blame_the_disk(watched: Watched) -> None:
    watched.ask()
    watched.loop.pass_time(0.5)
    watched.loop.now_s += 60.0  # stopped, and everything that was due comes at once
    watched.loop.pass_time(0.1)
    watched.tier.asked_s = None  # the answer was there all the time
    watched.loop.pass_time(60.0)
    assert not watched.tier.rests
    assert watched.tier.tries == []


def test_a_disk_that_goes_on_failing_is_probed_later_each_time(watched: Watched) -> None:
    watched.tier.is_well = False
    watched.tier.rests = True
    watched.watch.see_to_it()
    watched.loop.pass_time(2000.0)
    pauses = [later - sooner for sooner, later in zip([0.0, *watched.tier.tries], watched.tier.tries, strict=False)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert max(pauses) == LAST_PAUSE_S
    watched.tier.is_well = True
    watched.loop.pass_time(LAST_PAUSE_S)
    watched.watch.note_success(READS)
    watched.loop.pass_time(LAST_PAUSE_S + 1)
    watched.watch.note_success(READS)
    watched.tier.rests, count = True, len(watched.tier.tries)
    watched.watch.see_to_it()
    watched.loop.pass_time(FIRST_PAUSE_S)
    assert len(watched.tier.tries) == count + 1, "what has succeeded since begins with a short pause"


def test_one_good_read_between_bad_ones_does_not_shorten_the_pauses(watched: Watched) -> None:
    watched.tier.suspended = (READS,)
    for _ in range(8):
        watched.tier.rests, count = True, len(watched.tier.tries)
        watched.watch.see_to_it()
        while len(watched.tier.tries) == count:
            watched.loop.pass_time(FIRST_PAUSE_S / 2)
        watched.watch.note_success(READS)
    pauses = [later - sooner for sooner, later in zip([0.0, *watched.tier.tries], watched.tier.tries, strict=False)]
    assert pauses == [float(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**number)) for number in range(8)]


def test_writes_that_succeed_do_not_shorten_the_pauses_of_reads_that_fail(watched: Watched) -> None:
    watched.tier.suspended = (READS,)
    for _ in range(8):
        watched.tier.rests, count = True, len(watched.tier.tries)
        watched.watch.see_to_it()
        while len(watched.tier.tries) == count:
            watched.loop.pass_time(FIRST_PAUSE_S)
        watched.watch.note_success(WRITES)
    pauses = [later - sooner for sooner, later in zip([0.0, *watched.tier.tries], watched.tier.tries, strict=False)]
    assert pauses == [float(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**number)) for number in range(8)]
    watched.tier.suspended = (WRITES,)
    watched.tier.rests, now_s = True, watched.loop.now_s
    watched.watch.see_to_it()
    watched.loop.pass_time(FIRST_PAUSE_S)
    assert watched.tier.tries[-1] == now_s + FIRST_PAUSE_S, "writes have a pause of their own"


def test_before_the_tier_is_open_and_after_its_end_the_disk_is_not_watched() -> None:
    watched = Watched()
    watched.ask()
    watched.tier.rests = True
    watched.watch.see_to_it()
    assert watched.loop.waiting == []
    watched.start()
    watched.ask()
    watched.watch.see_to_it()
    watched.watch.stop()
    watched.loop.pass_time(1000.0)
    assert watched.tier.tries == []


@pytest.mark.parametrize("status", [SsdStatus.BAD_CHECKSUM, SsdStatus.BAD_WRITE])
def test_repeated_corruption_suspends_a_tier_for_longer(watched: Watched, status: SsdStatus) -> None:
    for number in range(CHUNKS):
        assert not watched.tier.rests
        watched.watch.note_result(status, 1, number)
        watched.watch.note_result(SsdStatus.OK, 1, number)
    assert watched.tier.rests
    assert watched.tier.corruption.problems() != []
    watched.loop.pass_time(REST_S - 1)
    assert watched.tier.tries == []
    watched.loop.pass_time(2)
    assert len(watched.tier.tries) == 1
