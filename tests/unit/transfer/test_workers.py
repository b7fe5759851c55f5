"""Transfer threads: bounded, each job reported once, copies and checks never wait for each other."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from kvpool.errors import Refused
from kvpool.transfer.workers import Cancelled, Workers
from tests.rigs.daemon import wait_until

END_S = 30.0


class Gate:
    """A job that has begun, and ends when it may."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(END_S)
        return "through"


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(1, queue_size=2, name="test-transfer")
    yield made
    made.stop()


@pytest.fixture
def gate(workers: Workers) -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_end.set()


def test_waiting_jobs_are_bounded_and_reported_in_order(workers: Workers, gate: Gate) -> None:
    reports: list[object] = []
    assert workers.submit(gate, reports.append)
    assert gate.has_begun.wait(END_S)
    assert [workers.submit(partial(int, number), reports.append) for number in (1, 2, 3)] == [True, True, False]
    assert workers.waiting == 2
    gate.may_end.set()
    wait_until(lambda: len(reports) == 3, "all that was accepted is reported")
    assert reports == ["through", 1, 2]
    assert (workers.waiting, workers.is_healthy) == (0, True)


def test_a_stop_waits_for_the_running_and_cancels_the_waiting(workers: Workers, gate: Gate) -> None:
    reports: list[object] = []
    assert workers.submit(gate, reports.append)
    assert gate.has_begun.wait(END_S)
    assert workers.submit(lambda: "never", reports.append)
    stopping = threading.Thread(target=workers.stop)
    stopping.start()
    wait_until(lambda: len(reports) == 1, "the waiting one is cancelled")
    assert isinstance(reports[0], Cancelled)
    assert stopping.is_alive()
    gate.may_end.set()
    stopping.join(END_S)
    assert reports[1:] == ["through"]
    assert not workers.submit(lambda: "late", reports.append)
    workers.stop()
    assert (len(reports), workers.waiting) == (2, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-transfer")]


def test_a_job_that_raises_is_reported_with_what_it_raised(workers: Workers) -> None:
    reports: list[object] = []
    assert workers.submit(lambda: 1 // 0, reports.append)
    wait_until(lambda: len(reports) == 1, "the failure is reported")
    assert isinstance(reports[0], ZeroDivisionError)
    assert workers.is_healthy


def test_a_thread_outlives_a_report_that_raises_and_health_shows_it(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def exit_thread(result: object) -> None:
        raise SystemExit

    reports: list[object] = []
    with caplog.at_level(logging.ERROR):
        assert workers.submit(lambda: "lost", exit_thread)
        wait_until(lambda: not workers.is_healthy, "the lost outcome is reported")
    assert "the outcome of a transfer job is lost" in caplog.text
    assert workers.submit(lambda: "next", reports.append)
    wait_until(lambda: reports == ["next"], "the thread goes on")


def test_a_copy_waits_for_no_check(workers: Workers, gate: Gate) -> None:
    async def run() -> None:
        check = asyncio.ensure_future(workers.check(gate))
        await asyncio.to_thread(gate.has_begun.wait, END_S)
        reports: list[object] = []
        assert workers.submit(lambda: "copied", reports.append)
        await asyncio.to_thread(wait_until, lambda: reports == ["copied"], "the copy is through")
        assert not check.done()
        gate.may_end.set()
        assert await check == "through"

    asyncio.run(run())


def test_one_check_too_many_is_refused(workers: Workers, gate: Gate) -> None:
    async def run() -> None:
        checks = [asyncio.ensure_future(workers.check(gate))]
        await asyncio.to_thread(gate.has_begun.wait, END_S)
        checks += [asyncio.ensure_future(workers.check(lambda: "later")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="too many jobs"):
            await workers.check(lambda: "too many")
        gate.may_end.set()
        assert await asyncio.gather(*checks) == ["through", "later", "later"]

    asyncio.run(run())
