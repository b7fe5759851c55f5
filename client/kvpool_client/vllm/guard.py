"""The border to the engine: whatever goes wrong behind it is a miss in front of it.

Each failure is counted, and logged once with its reason, because an engine asks thousands of times a second. Programmer
errors are no exception to that: an engine that computes everything is right, an engine that died is not.
Any thread. Lock: `_lock` guards the reasons that were logged.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

# Under vLLM's own name, because vLLM sets up logging for that alone.
LOG = logging.getLogger("vllm.kvpool")
REASONS_MAX = 256


class Guard:
    """Runs what an engine asks for. Invariant: `call` never raises an Exception."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[str] = set()  # guarded by _lock
        self.failures = 0

    def call(self, what: str, default: Answer, function: Callable[[], Answer]) -> Answer:
        """What `function` returns; `default` where it raises."""
        try:
            return function()
        except Exception as error:
            self.failures += 1
            self.complain(f"{what} failed: {type(error).__name__}", str(error), is_defect=True)
            return default

    def complain(self, reason: str, detail: str = "", *, is_defect: bool = False) -> None:
        """Log a reason, the first time that it is given."""
        with self._lock:
            if reason in self._said or len(self._said) >= REASONS_MAX:
                return
            self._said.add(reason)
        LOG.warning("kvpool: %s%s (said once)", reason, f": {detail}" if detail else "", exc_info=is_defect)
