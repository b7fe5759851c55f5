"""The border to an engine: what fails behind it becomes a miss, is counted, and is logged once.

Engine adapters end every call that an engine makes here, so that no exception of ours unwinds an engine's scheduler or
forward pass. It decides nothing: each caller says itself what its miss looks like. Any thread. Lock: `_lock` guards the
counts, never held across logging.
"""

import logging
import threading

from kvpool.errors import KVPoolError

# What the client, numpy, ctypes or a tensor's methods raise for anything that does not fit: never what a person's ^C does.
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


class Border:
    """Failures by the call in which they happened. Invariant: a call's first failure was logged, with its cause."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}  # guarded by _lock

    def miss(self, call: str, cause: object) -> None:
        """`call` could not do its work because of `cause`: the engine gets a miss."""
        with self._lock:
            count = self._failures.get(call, 0) + 1
            self._failures[call] = count
        if count == 1:
            self._logger.warning("%s missed: %s (said once, then counted)", call, cause)

    def counts(self) -> dict[str, int]:
        """Failures so far, by call."""
        with self._lock:
            return {f"failed_{call}": count for call, count in self._failures.items()}
