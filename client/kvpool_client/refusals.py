"""What an engine is refused, by reason: in the adapter's own counters, and where the engine shows its own.

SGLang and TensorRT-LLM have no door for a backend's metrics, but both show those of prometheus_client's registry, their ranks'
through its files. Where the engine has loaded that library, a counter stands in it, `kvpool_engine_refused_total` with the
labels `engine` and `reason`. It is never loaded from here.

A reason is the word before the first colon of a refusal. Any thread. Lock: `_lock` guards the counts.
"""

import contextlib
import sys
import threading
from typing import Any

METRIC = "kvpool_engine_refused"
HELP = "What the pool was asked and left alone: requests (trtllm) or pages (sglang), by reason"
REASONS_MAX = 64


class Refusals:
    """Refusals of one adapter. Invariant: beyond REASONS_MAX reasons, further ones count as `other`."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._by_reason: dict[str, int] = {}  # guarded by _lock
        self._counter: Any = None  # guarded by _lock

    def count(self, refusal: str, amount: int = 1) -> None:
        """`amount` things were refused for this."""
        reason = refusal.split(":", 1)[0]
        with self._lock:
            if reason not in self._by_reason and len(self._by_reason) >= REASONS_MAX:
                reason = "other"
            self._by_reason[reason] = self._by_reason.get(reason, 0) + amount
            self._counter = self._counter or _counter_of_engine()
            counter = self._counter
        if counter is not None:
            counter.labels(self._engine, reason).inc(amount)

    def counts(self) -> dict[str, int]:
        """How many so far, by reason."""
        with self._lock:
            return {f"refused_{reason}": count for reason, count in self._by_reason.items()}


def _counter_of_engine() -> Any:
    """The counter in the registry that the engine shows; None where it has loaded none."""
    library = sys.modules.get("prometheus_client")
    if library is None:
        return None
    with contextlib.suppress(ValueError):  # another adapter of this process has made it
        return library.Counter(METRIC, HELP, ["engine", "reason"])
    return getattr(library.REGISTRY, "_names_to_collectors", {}).get(METRIC)
