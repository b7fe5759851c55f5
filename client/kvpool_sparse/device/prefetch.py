"""Prefetch thread: one job at a time behind a step, to which its sequence belongs meanwhile.

    idle ──begin──► under way ──finish──► idle        close: under way ──stop──► ended

Between `begin` and the return of `finish` the job alone may touch the sequence and its staging area; so nothing here has
a lock. A job looks at `is_stopping` between its pieces. `begin`, `finish` and `close`: the sequence's thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

THREAD_NAME = "kvpool-sparse-prefetch"


class Prefetch:
    """See the module."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        self._job: Future[None] | None = None
        self._stop = Event()

    @property
    def is_stopping(self) -> bool:
        """Whether a job should end at its next piece."""
        return self._stop.is_set()

    def begin_job(self, job: Callable[[], None]) -> None:
        """Begin a job. Requires: none is under way."""
        assert self._job is None
        self._job = self._executor.submit(job)

    def finish(self) -> None:
        """Wait until no job is under way. Raises what it has raised."""
        if self._job is not None:
            try:
                self._job.result()
            finally:
                if self._job.done():  # else the wait was interrupted
                    self._job = None

    def close(self) -> None:
        """Stop the job and end the thread. Idempotent."""
        self._stop.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._job = None
