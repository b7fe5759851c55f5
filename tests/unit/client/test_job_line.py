"""JobLine: in order, bounded, and every job ended exactly once, after any failure, a drain and at the end."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.job_line import JobLine

TIMEOUT_S = 60.0
JOBS_MAX = 4


class Ended:
    """Jobs of a line, and with what they ended: a list for each."""

    def __init__(self, guard: FailureGuard, *, threads: int = 1) -> None:
        self.line = JobLine("kvpool-test", guard, jobs_max=JOBS_MAX, threads=threads)
        self.ended: dict[object, list[object]] = {}
        self._blocked: list[threading.Event] = []

    def submit(self, name: object, run: Callable[[], object] | None = None) -> bool:
        ended = self.ended.setdefault(name, [])
        return self.line.submit("working", (lambda: name) if run is None else run, ended.append)

    def block(self) -> threading.Event:
        """A job that runs until the event is set."""
        is_running, go_on = threading.Event(), threading.Event()
        self._blocked.append(go_on)

        def wait() -> str:
            is_running.set()
            assert go_on.wait(TIMEOUT_S)
            return "ran"

        assert self.submit("blocks", wait)
        assert is_running.wait(TIMEOUT_S)
        return go_on

    def close(self) -> None:
        for event in self._blocked:
            event.set()
        self.line.close()


@pytest.fixture
def guard() -> FailureGuard:
    return FailureGuard(logging.getLogger("test"))


@pytest.fixture
def jobs(guard: FailureGuard) -> Iterator[Ended]:
    jobs = Ended(guard)
    yield jobs
    jobs.close()


def test_jobs_run_in_their_order_and_end_with_their_results(jobs: Ended) -> None:
    order: list[int] = []

    def run(number: int) -> int:
        order.append(number)
        return -number

    for number in range(JOBS_MAX):
        assert jobs.submit(number, partial(run, number))
    jobs.line.drain(TIMEOUT_S)
    assert order == list(range(JOBS_MAX))
    assert jobs.ended == {number: [-number] for number in range(JOBS_MAX)}
    assert len(jobs.line) == 0


def test_a_full_line_refuses_and_the_job_has_ended_without_a_result(jobs: Ended) -> None:
    go_on = jobs.block()
    assert all(jobs.submit(number) for number in range(JOBS_MAX - 1))
    assert not jobs.submit("too many")
    assert jobs.ended["too many"] == [None]
    go_on.set()
    jobs.line.drain(TIMEOUT_S)
    assert jobs.submit("again")
    jobs.line.drain(TIMEOUT_S)
    assert jobs.ended["again"] == ["again"]
    assert jobs.ended["too many"] == [None]


def test_a_drain_withdraws_what_has_not_begun_and_waits_for_what_runs(jobs: Ended) -> None:
    go_on = jobs.block()
    jobs.submit(0)
    drained = threading.Thread(target=jobs.line.drain, args=(0.0,))
    is_withdrawn = threading.Event()
    jobs.line.submit("working", lambda: None, lambda _: is_withdrawn.set())
    drained.start()
    assert is_withdrawn.wait(TIMEOUT_S)
    assert drained.is_alive()
    assert jobs.ended["blocks"] == []
    go_on.set()
    drained.join(TIMEOUT_S)
    assert not drained.is_alive()
    assert jobs.ended == {"blocks": ["ran"], 0: [None]}
    assert jobs.submit(1)
    jobs.line.drain(TIMEOUT_S)
    assert jobs.ended[1] == [1]


def test_a_drain_of_a_line_without_jobs_returns(jobs: Ended) -> None:
    jobs.line.drain(TIMEOUT_S)
    assert len(jobs.line) == 0


def test_a_closed_line_ends_what_waits_and_refuses_the_rest(jobs: Ended) -> None:
    go_on = jobs.block()
    is_withdrawn = threading.Event()
    jobs.submit(0)
    jobs.line.submit("working", lambda: None, lambda _: is_withdrawn.set())
    closing = threading.Thread(target=jobs.line.close)
    closing.start()
    assert is_withdrawn.wait(TIMEOUT_S)
    assert closing.is_alive()
    assert not jobs.submit(1)
    go_on.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    jobs.line.close()
    assert jobs.ended == {"blocks": ["ran"], 0: [None], 1: [None]}


@pytest.mark.parametrize("failure", [OSError("gone"), SystemExit(1)])
def test_a_job_that_fails_ends_without_a_result_and_the_next_one_runs(jobs: Ended, failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    jobs.submit(0, fail)
    jobs.submit(1)
    jobs.line.drain(TIMEOUT_S)
    assert jobs.ended == {0: [None], 1: [1]}


def test_an_end_that_fails_is_counted_and_the_job_is_no_longer_open(jobs: Ended, guard: FailureGuard) -> None:
    def fail(result: object) -> None:
        raise LookupError(result)

    assert jobs.line.submit("working", lambda: 1, fail)
    jobs.line.drain(TIMEOUT_S)
    assert len(jobs.line) == 0
    assert guard.counts() == {"failed_working": 1}


def test_lines_have_threads_of_their_own(jobs: Ended, guard: FailureGuard) -> None:
    jobs.block()
    other = Ended(guard)
    other.submit("load")
    other.line.drain(TIMEOUT_S)
    assert other.ended == {"load": ["load"]}
    assert jobs.ended["blocks"] == []
    other.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_job_that_was_refused_for_want_of_a_thread_never_runs(
    guard: FailureGuard, monkeypatch: pytest.MonkeyPatch, threads: int, failure: Exception
) -> None:
    jobs, ran = Ended(guard, threads=threads), list[str]()
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("kvpool-test"):
            raise failure
        start(thread)

    if threads > 1:  # one thread is there, and busy; it would come to the refused job later
        go_on = jobs.block()
    monkeypatch.setattr(threading.Thread, "start", fail)
    for name in ("first", "second"):
        assert not jobs.submit(name, lambda: ran.append("refused"))
    assert [jobs.ended[name] for name in ("first", "second")] == [[None], [None]]
    monkeypatch.undo()
    if threads > 1:
        go_on.set()
        jobs.line.drain(TIMEOUT_S)
    for number in range(JOBS_MAX):
        assert jobs.submit(number)
    jobs.line.drain(TIMEOUT_S)
    jobs.close()
    assert ran == []
    assert [jobs.ended[name] for name in ("first", "second", *range(JOBS_MAX))] == [
        [None],
        [None],
        *([n] for n in range(JOBS_MAX)),
    ]


def test_a_job_that_a_thread_has_begun_is_not_refused_where_another_thread_fails_to_start(
    jobs: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        jobs.line._executor._work_queue.get_nowait().run()  # as a thread that has just become free does
        raise RuntimeError(f"can't start {thread.name}")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert jobs.submit("begun")
    monkeypatch.undo()
    jobs.line.drain(TIMEOUT_S)
    assert jobs.ended == {"begun": ["begun"]}
