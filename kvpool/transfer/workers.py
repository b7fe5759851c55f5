"""Workers: two bounded pools of threads beside the control thread, which report each job exactly once.

Guarantees:
1. Neither `submit` nor `check` blocks: where too many jobs wait, both refuse.
2. Copies have their own threads and checks have one more: no copy waits for a check.
3. Every accepted job is reported once: `done` is called with its result, or with the exception it ended in, or with
   `Cancelled` when the pool stops first. It is called on the job's thread (on the stopping one for cancelled jobs).
4. `stop` waits for running jobs and cancels waiting ones.
5. A thread outlives whatever its jobs raise. Where a report itself raised, a caller may wait for ever: `is_healthy` shows that.

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
    """The result of a job that the pool's end cancelled."""


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
        """On the job's thread, or on the stopping one."""
        if future.cancelled():
            with self._lock:
                self._waiting -= 1
            done(Cancelled("the transfer threads have stopped"))
        elif (error := future.exception()) is not None:
            log.error("the outcome of a transfer job is lost", exc_info=error)
            with self._lock:
                self._lost_outcomes += 1


def call_later(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Have the event loop call something, from another thread; nothing if the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):  # "Event loop is closed": the daemon has stopped, no caller waits
        loop.call_soon_threadsafe(call, *arguments)


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """An executor with all its threads started: a lack of threads shows at the start, and not at a request."""
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
