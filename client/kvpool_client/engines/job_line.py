"""Job line: background jobs of an adapter whose engine must not be blocked, over threads of the line's own.

    submitted ──its turn──► runs ──► ended with its result, or with None where it raised
        ├─ the line is full or closed ──► ended with None at once
        └─ withdrawn by `drain` or `close` before its turn ──► ended with None

Loads and stores have a line each, so that a load never waits for a store. A line does not cancel what runs: a job ends by
deadlines of its own, and its memory is in use until it has ended.

Invariants: every job is ended exactly once, and none runs once it has ended: the executor keeps what it has queued where it
cannot start a thread, so a turn runs only a job that is still waiting. At most `jobs_max` are open; with one thread they run in
order. Any thread. `end`
is called on the line's thread, or on that of whoever submits, drains or closes; it must neither block nor submit. Lock:
`_changed` guards the open jobs, and is held while a job is handed to the executor, never while it runs or is ended.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvpool_client.engines.failure_guard import FailureGuard

Result = TypeVar("Result")


class JobLine:
    """See the module."""

    def __init__(self, name: str, guard: FailureGuard, *, jobs_max: int, threads: int = 1) -> None:
        """`name`: of its threads. `jobs_max`: how many jobs are open at most, those that run included."""
        self._guard = guard
        self._jobs_max = jobs_max
        self._changed = threading.Condition()
        self._open: set[Future[Any]] = set()  # guarded by _changed
        self._is_closed = False  # guarded by _changed
        self._new_executor = partial(ThreadPoolExecutor, threads, thread_name_prefix=name)
        self._executor = self._new_executor()  # guarded by _changed
        self._has_thread = False  # guarded by _changed

    def __repr__(self) -> str:
        return f"<JobLine {len(self._open)}/{self._jobs_max} open{', closed' * self._is_closed}>"

    def __len__(self) -> int:
        """How many jobs are open: submitted and not ended."""
        return len(self._open)

    def submit(self, call: str, run: Callable[[], Result], end: Callable[[Result | None], None]) -> bool:
        """Have `run` called in its turn and `end` with its result. Returns False where the job was refused, and has ended.

        `call` names the job in the failure guard.
        """
        job = self._begin_job(call, run)
        if job is None:
            self._guard.call(call, None, end, None)
            return False
        job.add_done_callback(partial(self._end_job, call, end))
        return True

    def drain(self, timeout_s: float, when_late: Callable[[], None] | None = None) -> None:
        """Wait until every job has ended. What has not begun after `timeout_s` is withdrawn; what runs is waited for.

        `when_late` is called then, where a job still runs: it may have it end sooner than by its own deadlines.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
        is_running = [not job.cancel() for job in left]
        if when_late is not None and any(is_running):
            when_late()
        with self._changed:
            self._changed.wait_for(lambda: not self._open.intersection(left))

    def close(self) -> None:
        """Refuse further jobs, withdraw those that have not begun, and wait for those that run. Idempotent."""
        with self._changed:
            self._is_closed = True
            left = list(self._open)
        for job in left:
            job.cancel()
        self._executor.shutdown(cancel_futures=True)

    def _begin_job(self, call: str, run: Callable[[], Result]) -> "Future[Result | None] | None":
        """The job in its place; None where there is none."""
        job: Future[Result | None] = Future()
        with self._changed:
            if self._is_closed or len(self._open) >= self._jobs_max:
                return None
            try:
                self._executor.submit(self._take_turn, job, call, run)
                self._has_thread = True
            except (
                RuntimeError,
                MemoryError,
            ):  # the interpreter ends, or has no thread left; it may be queued all the same
                is_revoked = job.cancel()
                if not self._has_thread:  # nothing else is queued, and nobody would take it from there
                    self._executor.shutdown(wait=False, cancel_futures=True)
                    self._executor = self._new_executor()
                if is_revoked:
                    return None
            self._open.add(job)
        return job

    def _take_turn(self, job: "Future[Result | None]", call: str, run: Callable[[], Result]) -> None:
        """Run a job that is still waiting."""
        if not job.set_running_or_notify_cancel():
            return
        result: Result | None = None
        try:
            result = self._guard.call(call, None, run)
        finally:
            job.set_result(result)

    def _end_job(self, call: str, end: "Callable[[Result | None], None]", job: "Future[Result | None]") -> None:
        try:
            self._guard.call(call, None, end, None if job.cancelled() else job.result())
        finally:
            with self._changed:
                self._open.discard(job)
                self._changed.notify_all()
