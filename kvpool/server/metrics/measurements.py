"""Measurements of the daemon, taken at one moment on the control thread and read on others.

`LoopReader` takes them: it hops to the event loop, has them read there, and waits with a deadline. For any number of readers at
most one call waits in the loop, so that a hanging loop gathers no calls.

Any thread but the loop's own. Lock: `_lock` guards the reading that is on its way; never held across a wait.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvpool.errors import KVPoolError
from kvpool.server.health.health import HealthReport
from kvpool.server.metrics.request_times import VerbTimes
from kvpool.usage import Measurements

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The daemon at one moment. `connections` counts the open ones by role; `peers` are the rows of the known members, in the
    order of their addresses (`peer_list`). Nothing here changes afterwards."""

    build: Mapping[str, str]
    pool: Measurements
    connections: Mapping[str, int]
    verbs: Mapping[str, VerbTimes]
    health: HealthReport
    peers: tuple[dict[str, Any], ...] = ()


class LoopStalled(KVPoolError):
    """The control thread did not answer in time."""


class LoopReader(Generic[Result]):
    """Reads something on the event loop, for other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Result], timeout_s: float) -> None:
        self._loop = loop
        self._read = read
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._under_way: Future[Result] | None = None  # guarded by _lock

    def read(self) -> Result:
        """The result of `read` on the loop, taken after this call began. Raises LoopStalled, or what `read` raised."""
        with self._lock:
            answer = self._under_way
            is_first = answer is None
            if answer is None:
                answer = self._under_way = Future()
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError as error:  # "Event loop is closed"
                raise LoopStalled("the control thread has ended") from error
        try:
            return answer.result(self._timeout_s)
        except FutureTimeoutError as error:
            # The call may still run; until its end other readers join it.
            raise LoopStalled(f"the control thread did not answer within {self._timeout_s:g} s") from error

    def _answer(self) -> None:
        with self._lock:
            answer, self._under_way = self._under_way, None
        assert answer is not None
        try:
            answer.set_result(self._read())
        except BaseException as error:
            answer.set_exception(error)
            raise
