"""Reading on the event loop from other threads: fresh, shared, and with a deadline when the loop is blocked."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.server.metrics.measurements import LoopReader, LoopStalled
from tests.rigs.daemon import wait_until


class StandingLoop:
    """An event loop on a thread of its own that its test can block and continue."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._go_on = threading.Event()

    def stand_still(self) -> None:
        standing = threading.Event()

        def stand() -> None:
            standing.set()
            assert self._go_on.wait(20.0)

        self.loop.call_soon_threadsafe(stand)
        assert standing.wait(10.0)

    def go_on(self) -> None:
        self._go_on.set()

    def end(self) -> None:
        self.go_on()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()


@pytest.fixture
def standing() -> Iterator[StandingLoop]:
    loop = StandingLoop()
    yield loop
    loop.end()


def test_a_blocked_loop_is_a_late_answer_and_queues_one_call(standing: StandingLoop) -> None:
    reads = []
    reader = LoopReader(standing.loop, lambda: reads.append(1), 0.05)
    standing.stand_still()
    with ThreadPoolExecutor(4) as threads:
        late = [threads.submit(reader.read) for _ in range(8)]
        assert all(isinstance(answer.exception(10.0), LoopStalled) for answer in late)
    assert reads == []
    standing.go_on()
    wait_until(lambda: len(reads) == 1, "the one call that waited is made")
    patient = LoopReader(standing.loop, lambda: len(reads), 5.0)
    assert patient.read() == 1


def test_an_error_on_the_loop_reaches_the_caller(standing: StandingLoop) -> None:
    seen: list[object] = []
    standing.loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))

    def fail() -> None:
        raise ZeroDivisionError("oops")

    reader = LoopReader(standing.loop, fail, 5.0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            reader.read()
    wait_until(lambda: len(seen) == 2, "the loop hears of it too")


def test_a_loop_that_has_ended_is_a_late_answer() -> None:
    loop = StandingLoop()
    reader = LoopReader(loop.loop, lambda: 1, 5.0)
    loop.end()
    with pytest.raises(LoopStalled):
        reader.read()
