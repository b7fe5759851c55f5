"""Failure guard: whatever fails behind an engine's call becomes a miss, is counted, and is logged once.

Engine adapters wrap every call that an engine makes, so that no exception of the client unwinds an engine's scheduler or
forward pass. Programmer errors are caught too: an engine that computes everything gives right answers, one that died gives
none. The guard decides nothing: each caller passes what its miss looks like. Any thread. Lock: `_lock` guards counts and
reasons, never held across logging.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvpool.errors import KVPoolError

Answer = TypeVar("Answer")

# What the client, numpy, ctypes or a tensor's methods raise for arguments that do not fit; KeyboardInterrupt is not among them.
ENGINE_FAILURES = (
    KVPoolError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
REASONS_MAX = 256


class FailureGuard:
    """Failures by the call in which they happened. Invariant: a call's first failure was logged, with its cause."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}  # guarded by _lock
        self._logged: set[str] = set()  # guarded by _lock

    def call(self, call: str, default: Answer, function: Callable[..., Answer], *arguments: object) -> Answer:
        """Call `function`. Returns its result, or `default`, a miss, where it raises."""
        try:
            return function(*arguments)
        except Exception as error:
            self._count(call)
            self.warn_once(f"{call} failed: {type(error).__name__}", str(error), is_defect=True)
            return default

    def miss(self, call: str, cause: object) -> None:
        """`call` could not do its work because of `cause`: the engine gets a miss."""
        if self._count(call) == 1:
            self._logger.warning("%s missed: %s (logged once, then counted)", call, cause)

    def warn_once(self, reason: str, detail: str = "", *, is_defect: bool = False) -> None:
        """Log a reason, the first time that it is given."""
        with self._lock:
            if reason in self._logged or len(self._logged) >= REASONS_MAX:
                return
            self._logged.add(reason)
        self._logger.warning("kvpool: %s%s (logged once)", reason, f": {detail}" if detail else "", exc_info=is_defect)

    @property
    def failures(self) -> int:
        """Failures so far, of all calls."""
        with self._lock:
            return sum(self._failures.values())

    def counts(self) -> dict[str, int]:
        """Failures so far, by call."""
        with self._lock:
            return {f"failed_{call}": count for call, count in self._failures.items()}

    def _count(self, call: str) -> int:
        with self._lock:
            count = self._failures[call] = self._failures.get(call, 0) + 1
        return count
