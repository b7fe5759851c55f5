"""A pool of named threads that run jobs and report each exactly once.

Guarantees:
1. `submit` never blocks: a full queue refuses.
2. Jobs of a higher urgency start first; among equals the oldest does.
3. Every accepted job is reported once: `done` is called with its result, or with the exception it ended in, or with
   `Cancelled` when the pool stops first. It is called on a worker thread (on the stopping thread for cancelled jobs).
4. `stop` waits for running jobs and cancels waiting ones.

Lock order: `_lock` is the only lock and is never held while a job or a report runs.
"""

import asyncio
import contextlib
import heapq
import logging
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from kvpool import failpoint
from kvpool.errors import KVPoolError, Refused

log = logging.getLogger(__name__)

Result = object
Job = Callable[[], Result]
Report = Callable[[Result], None]
Outcome = TypeVar("Outcome")


class Urgency(IntEnum):
    """Which jobs go first: loads before saves, both before housekeeping."""

    LOAD = 0
    SAVE = 1
    HOUSEKEEPING = 2


class Cancelled(KVPoolError):
    """The result of a job that the pool's end overtook."""


class Workers:
    """The transfer threads of one daemon."""

    def __init__(self, threads: int, *, queue_size: int, name: str = "kvpool-transfer") -> None:
        assert threads > 0
        assert queue_size > 0
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, Job, Report]] = []  # guarded by _lock
        self._queue_size = queue_size
        self._submitted = 0  # guarded by _lock
        self._is_stopping = False  # guarded by _lock
        self.failed_jobs = 0  # guarded by _lock
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<Workers {len(self._threads)} threads, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        with self._lock:
            return len(self._queue)

    @property
    def is_healthy(self) -> bool:
        """Whether every thread lives, or has been told to end."""
        with self._lock:
            return self._is_stopping or all(thread.is_alive() for thread in self._threads)

    def submit(self, job: Job, done: Report, urgency: Urgency) -> bool:
        """Queue a job. False when the queue is full or the pool stops; then `done` is never called."""
        with self._lock:
            if self._is_stopping or len(self._queue) >= self._queue_size:
                return False
            self._submitted += 1
            heapq.heappush(self._queue, (urgency, self._submitted, job, done))
            self._wake.notify()
        return True

    async def run(self, job: Callable[[], Outcome], urgency: Urgency) -> Outcome:
        """Run a job and wait for it on the event loop. Raises what it raised, Refused when the queue is full."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        if not self.submit(job, lambda result: call_later(loop, _settle, answer, result), urgency):
            raise Refused("busy", "too many jobs are waiting for the transfer threads: try again later")
        outcome: Outcome = await answer
        return outcome

    def stop(self) -> None:
        """End the threads. Idempotent."""
        with self._lock:
            self._is_stopping = True
            dropped, self._queue = self._queue, []
            self._wake.notify_all()
        for _, _, _, done in dropped:
            done(Cancelled("the transfer threads have stopped"))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._is_stopping:
                    self._wake.wait()
                if not self._queue:
                    return
                _, _, job, done = heapq.heappop(self._queue)
            result: Result
            try:
                failpoint.reach("daemon.transfer.job")
                result = job()
            except Exception as error:
                log.exception("transfer job %r failed", job)
                with self._lock:
                    self.failed_jobs += 1
                result = error
            done(result)


def call_later(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Have the event loop call something, from another thread; nothing if the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):  # "Event loop is closed": the daemon has stopped, nobody waits
        loop.call_soon_threadsafe(call, *arguments)


def _settle(answer: "asyncio.Future[Any]", result: Result) -> None:
    if answer.cancelled():
        return
    if isinstance(result, BaseException):
        answer.set_exception(result)
    else:
        answer.set_result(result)
