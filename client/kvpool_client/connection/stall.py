"""Stall detection: a copy that has made no progress for a time. One thread at a time."""

from typing import Protocol

from kvpool.clock import Deadline

WAIT_SLICE_S = 0.05


class Progressing(Protocol):
    """Something that counts what it has finished."""

    def progress(self) -> int:
        """Units finished so far."""
        ...


class Stall:
    """Watches one run. Invariant: the deadline is `timeout_s` after the last observed progress."""

    def __init__(self, run: Progressing, timeout_s: float) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._seen = run.progress()
        self._deadline = Deadline(timeout_s)

    def has_lasted(self) -> bool:
        """Whether nothing was finished for the whole time."""
        seen = self._run.progress()
        if seen != self._seen:
            self._seen = seen
            self._deadline = Deadline(self._timeout_s)
        return self._deadline.has_passed()

    def slice_s(self) -> float:
        """How long to wait before the next look."""
        return min(WAIT_SLICE_S, self._deadline.remaining_s())
