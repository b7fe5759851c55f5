"""Prometheus counters of the connector, beside vLLM's own on its `/metrics`.

vLLM gathers the counts of both halves (see `statistics`) and passes on each interval's numbers; here they are added to counters
that vLLM's front end has made. Names that differ in a tier or a reason alone share a counter and have a label for it.
Invariant: a number is added to one counter at most; what is counted by tier has no sum of its own. The front end's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool_client.vllm.statistics import Number


class Counter(Protocol):
    """One of `prometheus_client`'s, or Ray's in its place."""

    def labels(self, *values: object) -> "Counter":
        """The counter of these labels."""
        ...

    def inc(self, amount: Number) -> None:
        """Count."""
        ...


MakeMetric = Callable[..., Counter]

# The beginning of a name, the label that takes the rest of it, and what is counted.
FAMILIES = (
    ("hit_tokens", "tier", "Tokens that vLLM took from the pool instead of computing them, by the tier they were in"),
    ("declined_tokens", "reason", "Tokens that the pool had and that were not taken, by reason"),
    ("declined_chunks", "reason", "Chunks that the pool declined to store, by reason"),
    ("failed_loads", "reason", "Requests that had to compute what they were to load, by reason"),
    ("short_loads", "reason", "Loads of a rank that did not bring every chunk, by reason"),
    ("refusals", "reason", "Processes of vLLM that run without a pool, by what is not served"),
    ("waits_for", "whom", "Requests held back for a moment, by what they waited for"),
    ("hints", "outcome", "Hints of requests in kv_transfer_params, by outcome"),
)
COUNTERS = {
    "lookups": "Prompts that were looked up",
    "loads": "Loads of a rank that have ended",
    "loaded_chunks": "Chunks that were loaded and verified",
    "load_seconds": "Time that loads took, each from its claim to its last byte",
    "saved_chunks": "Chunks that were stored",
    "present_chunks": "Chunks that need not be stored because the pool has them",
    "dropped_saves": "Saves that were given up",
    "clipped_chunks": "Saved chunks that stay at the default priority because the share above it is full",
    "retained_chunks": "Stored chunks whose retention a later request has set",
    "announced_chunks": "Chunks of waiting requests that were announced and are in DRAM or are promoted to it",
    "dropped_hints": "Hints and announcements that were not sent because too many waited",
    "weights_bytes_read": "Bytes of the weights' files that were read for their digest; until it is known, nothing is loaded",
    "engine_seconds": "Time that vLLM spent in the connector, but for what a worker without work spends",
}
# The sum of its family, which has it by tier.
SUMS = {"hit_tokens"}


class PrometheusCounters:
    """Has the methods that vLLM calls of its `KVConnectorPromMetrics`."""

    def __init__(
        self,
        metric_types: Mapping[type, MakeMetric],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        make = next(made for kind, made in metric_types.items() if kind.__name__ == "Counter")
        self._engines = per_engine_labelvalues
        self._families = {
            name: make(name=f"vllm:kvpool_{name}", documentation=f"{text}.", labelnames=[*labelnames, label])
            for name, label, text in FAMILIES
        }
        self._counters = {
            name: make(name=f"vllm:kvpool_{name}", documentation=f"{text}.", labelnames=list(labelnames))
            for name, text in COUNTERS.items()
        }

    def __repr__(self) -> str:
        return f"<PrometheusCounters of {len(self._engines)} engines>"

    def observe(self, transfer_stats_data: Mapping[str, Number], engine_idx: int = 0) -> None:
        """Add an interval's numbers of one engine."""
        engine = self._engines[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in SUMS:
                continue
            if name in self._counters:
                self._counters[name].labels(*engine).inc(amount)
                continue
            family = next((family for family in self._families if name.startswith(f"{family}_")), None)
            if family is not None:
                self._families[family].labels(*engine, name[len(family) + 1 :]).inc(amount)
