"""Workers: two bounded pools of threads beside the control thread, which report each job exactly once.

Guarantees:
1. Neither `submit` nor `check` blocks: both refuse a job when too many wait.
2. Copies and checks have separate threads: no copy waits for a check.
3. Every accepted job is reported once: `done` gets its result, the exception that ended it, or `Cancelled` where the pool
   stopped first. `done` runs on the job's thread; for a cancelled job it runs on the thread that stops the pool.
4. `stop` waits for running jobs and cancels waiting ones.
5. An exception in a job does not end its thread. If `done` itself raises, a caller may wait for ever: `is_healthy` is then
   False.

Lock order: `_lock`, then the locks of the executors. It is never held while a job or a report runs.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvpool import failpoint
from kvpool.errors import KVPoolError, Refused

log = logging.getLogger(__name__)

Result = object
Job = Callable[[], Result]
Report = Callable[[Result], None]
Outcome = TypeVar("Outcome")


class Cancelled(KVPoolError):
    """The result of a job that `stop` cancelled."""


class Workers:
    """The transfer threads of one daemon: `threads` that copy, and one that checks."""

    def __init__(self, threads: int, *, queue_size: int, name: str = "kvpool-transfer") -> None:
        assert threads > 0
        assert queue_size > 0
        self._lock = threading.Lock()
        self._queue_size = queue_size
        self._waiting = 0  # guarded by _lock; accepted, and not begun
        self._is_stopping = False  # guarded by _lock
        self._lost_outcomes = 0  # guarded by _lock
        self._copies = _started(threads, name)
        self._checks = _started(1, f"{name}-check")

    def __repr__(self) -> str:
        return f"<Workers {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        with self._lock:
            return self._waiting

    @property
    def is_healthy(self) -> bool:
        """Whether every job that has ended was reported."""
        with self._lock:
            return self._lost_outcomes == 0

    def submit(self, job: Job, done: Report) -> bool:
        """Queue a copy. False when too many jobs wait or the pool stops; then `done` is never called."""
        return self._submit(self._copies, job, done)

    async def check(self, job: Callable[[], Outcome]) -> Outcome:
        """Run a check and wait for it on the event loop. Raises what it raised, Refused when too many jobs wait."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        if not self._submit(self._checks, job, lambda result: call_later(loop, _settle, answer, result)):
            raise Refused("busy", "too many jobs are waiting for the transfer threads: try again later")
        outcome: Outcome = await answer
        return outcome

    def stop(self) -> None:
        """End the threads. Idempotent."""
        with self._lock:
            self._is_stopping = True
        for executor in (self._copies, self._checks):
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in (self._copies, self._checks):
            executor.shutdown()

    def _submit(self, executor: ThreadPoolExecutor, job: Job, done: Report) -> bool:
        with self._lock:
            if self._is_stopping or self._waiting >= self._queue_size:
                return False
            self._waiting += 1
            executor.submit(self._perform, job, done).add_done_callback(partial(self._finish, done))
        return True

    def _perform(self, job: Job, done: Report) -> None:
        with self._lock:
            self._waiting -= 1
        result: Result
        try:
            failpoint.reach("daemon.transfer.job")
            result = job()
        except Exception as error:
            log.exception("transfer job %r failed", job)
            result = error
        done(result)

    def _finish(self, done: Report, future: "Future[None]") -> None:
        """Report a job. Runs on the job's thread, or on the thread that stops the pool."""
        if future.cancelled():
            with self._lock:
                self._waiting -= 1
            done(Cancelled("the transfer threads have stopped"))
        elif (error := future.exception()) is not None:
            log.error("the outcome of a transfer job is lost", exc_info=error)
            with self._lock:
                self._lost_outcomes += 1


def call_later(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Have the event loop call a function. For other threads; does nothing if the loop has ended."""
    with contextlib.suppress(RuntimeError):  # "Event loop is closed": the daemon has stopped, no caller waits
        loop.call_soon_threadsafe(call, *arguments)


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads all run, so that a machine without threads to spare fails the start and not a request."""
    executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
    everybody = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            executor.submit(everybody.wait)
    except RuntimeError:
        everybody.abort()
        raise
    everybody.wait()
    return executor


def _settle(answer: "asyncio.Future[Any]", result: Result) -> None:
    if answer.cancelled():
        return
    if isinstance(result, BaseException):
        answer.set_exception(result)
    else:
        answer.set_result(result)
