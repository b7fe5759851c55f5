"""BackgroundQueue of a scheduler: in order, bounded, and every call made or dropped, after any failure and at the end."""

import logging
import threading
from collections.abc import Iterator

import pytest

from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.vllm.scheduler.background_queue import BackgroundQueue

TIMEOUT_S = 60.0
WAITING_MAX = 3


class Worked:
    """The outcomes of calls, by their numbers."""

    def __init__(self, guard: FailureGuard) -> None:
        self.queue = BackgroundQueue("kvpool-test", "working", WAITING_MAX, guard)
        self.done: list[int] = []
        self.dropped: list[int] = []
        self._all_done = threading.Event()

    def send(self, number: int) -> None:
        self.queue.send(lambda: self.done.append(number), dropped=lambda: self.dropped.append(number))

    def block(self) -> threading.Event:
        """A call that does not return until the event is set."""
        is_out, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            is_out.set()
            assert go_on.wait(TIMEOUT_S)

        self.queue.send(wait, dropped=lambda: None)
        assert is_out.wait(TIMEOUT_S)
        return go_on

    def wait(self) -> None:
        """Until what was sent has been carried out."""
        self.queue.send(self._all_done.set, dropped=lambda: None)
        assert self._all_done.wait(TIMEOUT_S)
        self._all_done.clear()


@pytest.fixture
def guard() -> FailureGuard:
    return FailureGuard(logging.getLogger("test"))


@pytest.fixture
def worked(guard: FailureGuard) -> Iterator[Worked]:
    worked = Worked(guard)
    yield worked
    worked.queue.stop()


def test_calls_are_made_in_their_order(worked: Worked) -> None:
    for number in range(2):
        worked.send(number)
    worked.wait()
    assert worked.done == [0, 1]
    assert worked.dropped == []


def test_a_call_beyond_the_bound_is_dropped_and_reported(worked: Worked) -> None:
    go_on = worked.block()
    for number in range(WAITING_MAX + 2):
        worked.send(number)
    assert worked.dropped == [WAITING_MAX, WAITING_MAX + 1]
    go_on.set()


def test_a_stop_drops_what_has_not_begun(worked: Worked) -> None:
    go_on = worked.block()
    worked.send(0)
    worked.send(1)
    stopping = threading.Thread(target=worked.queue.stop)
    stopping.start()
    go_on.set()
    stopping.join(TIMEOUT_S)
    assert not stopping.is_alive()
    assert sorted(worked.done + worked.dropped) == [0, 1]
    worked.send(2)
    assert worked.dropped[-1] == 2


def test_a_call_that_fails_is_counted_and_the_next_is_made(worked: Worked, guard: FailureGuard) -> None:
    def fail() -> None:
        raise OSError("gone")

    worked.queue.send(fail, dropped=lambda: None)
    worked.send(1)
    worked.wait()
    assert worked.done == [1]
    assert guard.counts() == {"failed_working": 1}
