"""Refusals of an engine, by reason: in the adapter's own counters, and where the engine shows its own.

SGLang and TensorRT-LLM have no door for a backend's metrics, but both show those of prometheus_client's registry, their ranks'
through its files. A counter stands in it, `kvpool_engine_refused_total` with the labels `engine` and `reason`: where the engine
has loaded that library, or has named the folder of its files to the process (PROMETHEUS_MULTIPROC_DIR), whose ranks load it
for nothing else. What was counted before that is shown as soon as somebody counts or calls `show`: a rank that is refused
at its start is refused once.

A reason is the word before the first colon of a refusal. Any thread. Lock: `_lock` guards the counts.
"""

import contextlib
import importlib
import os
import sys
import threading
from typing import Any

METRIC = "kvpool_engine_refused"
HELP = "What the pool was asked and left alone: requests (trtllm) or pages (sglang), by reason"
REASONS_MAX = 64
FILES = "PROMETHEUS_MULTIPROC_DIR"


class Refusals:
    """Refusals of one adapter.

    Invariants: beyond REASONS_MAX reasons, further ones count as `other`; each refusal is shown once.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._by_reason: dict[str, int] = {}  # guarded by _lock
        self._unshown: dict[str, int] = {}  # guarded by _lock
        self._counter: Any = None  # guarded by _lock

    def count(self, refusal: str, amount: int = 1) -> None:
        """`amount` things were refused for this."""
        reason = refusal.split(":", 1)[0]
        with self._lock:
            if reason not in self._by_reason and len(self._by_reason) >= REASONS_MAX:
                reason = "other"
            self._by_reason[reason] = self._by_reason.get(reason, 0) + amount
            self._unshown[reason] = self._unshown.get(reason, 0) + amount
        self.show()

    def show(self) -> None:
        """Put into the engine's registry what is not there, if there is a registry by now. Cheap where nothing is missing."""
        with self._lock:
            counter = self._counter = self._counter or (_counter_of_engine() if self._unshown else None)
            if counter is None:
                return
            taken, self._unshown = self._unshown, {}
        for reason, amount in taken.items():
            counter.labels(self._engine, reason).inc(amount)

    def counts(self) -> dict[str, int]:
        """How many so far, by reason."""
        with self._lock:
            return {f"refused_{reason}": count for reason, count in self._by_reason.items()}


def _counter_of_engine() -> Any:
    """The counter in the registry that the engine shows; None where there is none."""
    library: Any = sys.modules.get("prometheus_client")
    if library is None and os.environ.get(FILES):
        with contextlib.suppress(ImportError):  # an engine without that library shows nothing
            library = importlib.import_module("prometheus_client")
    if library is None:
        return None
    with contextlib.suppress(ValueError):  # another adapter of this process has made it
        return library.Counter(METRIC, HELP, ["engine", "reason"])
    return getattr(library.REGISTRY, "_names_to_collectors", {}).get(METRIC)
