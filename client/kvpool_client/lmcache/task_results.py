"""Task results: how LMCache's tasks of one kind have ended, until it asks, and the descriptor that wakes it.

    begun ──put──► ended, LMCache is woken ──taken──► forgotten
                      └──LMCache never asks, RESULTS_MAX younger ones ended──► forgotten

Invariant: each task ends once, and the descriptor is written once for each; after `close` neither. Any thread. Lock: `_guarded`
guards all fields, and the descriptor's end, so that nothing is written to another file of that number.
"""

import threading
from typing import Generic, Protocol, TypeVar

Outcome = TypeVar("Outcome")

# LMCache gives up a request without asking for its results.
RESULTS_MAX = 65536


class Notifier(Protocol):
    """LMCache's EventNotifier."""

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        ...

    def notify(self) -> None:
        """Make it readable. Does not wait."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class TaskResults(Generic[Outcome]):
    """See the module."""

    def __init__(self, notifier: Notifier) -> None:
        """Takes `notifier`, which is closed with it."""
        self._notifier = notifier
        self._guarded = threading.Lock()
        self._next = 0
        self._ended: dict[int, Outcome] = {}  # oldest first
        self._is_closed = False
        self.descriptor = notifier.fileno()

    def begin(self) -> int:
        """The id of a new task."""
        with self._guarded:
            self._next += 1
            return self._next

    def put(self, task: int, outcome: Outcome) -> None:
        """The task has ended like this."""
        with self._guarded:
            if self._is_closed:
                return
            self._ended[task] = outcome
            if len(self._ended) > RESULTS_MAX:
                del self._ended[next(iter(self._ended))]
            self._notifier.notify()

    def take(self, task: int) -> Outcome | None:
        """How it has ended, once; None while it has not."""
        with self._guarded:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[int, Outcome]:
        """All that have ended since."""
        with self._guarded:
            ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._guarded:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()
