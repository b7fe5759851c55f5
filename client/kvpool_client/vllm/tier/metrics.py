"""Metrics of the tier, by vLLM's own hooks: counters on its `/metrics` and in its log, beside those of its tiering manager.

Names that differ in a reason alone share a counter and have a label for it. Invariant: every name that is counted has a
definition. Pure; any thread.
"""

from collections.abc import Mapping
from typing import Any

PREFIX = "vllm:kvpool_tier_"
REASON = "reason"
BY_REASON = {
    "failed_chunks": "Chunks that were to be loaded and were not, by reason; vLLM computes them",
    "declined_chunks": "Chunks that were not stored, by reason",
    "refused_requests": "Requests that were served without a pool, by reason",
}
COUNTERS = {
    "loaded_chunks": "Chunks that were loaded into vLLM's host region and verified",
    "saved_chunks": "Chunks that were stored",
    "present_chunks": "Chunks that need not be stored because the pool has them; they count as used",
    "used_chunks": "Chunks of requests that have ended, which count as used from the beginning of the prompt on",
    "clipped_chunks": "Saved chunks that stay at the default priority because the share above it is full",
    "rejected_hints": "Hints of requests that were rejected",
    "flushes": "Resets of vLLM's cache after which the model's chunks were dropped",
    "failed_flushes": "Resets after which the model's chunks were left; this engine finds none of them",
}


def metric_of(name: str) -> tuple[str, tuple[str, ...]]:
    """The metric of a counted name, and its labels' values."""
    family = next((each for each in BY_REASON if name.startswith(f"{each}_")), None)
    if family is None:
        return PREFIX + name, ()
    return PREFIX + family, (name[len(family) + 1 :],)


def definitions(make: Any) -> dict[str, Any]:
    """vLLM's definition of each metric. `make`: its class of counters."""
    found = {PREFIX + name: make(documentation=f"{text}.") for name, text in COUNTERS.items()}
    return found | {
        PREFIX + name: make(documentation=f"{text}.", labelnames=(REASON,)) for name, text in BY_REASON.items()
    }


def put_counts(counts: Mapping[str, int | float], stats: Any) -> Any:
    """These counts in vLLM's record, which is answered."""
    for name, amount in counts.items():
        metric, labels = metric_of(name)
        stats.increase_counter(metric, amount, labels)
    return stats
