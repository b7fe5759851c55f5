"""KVPoolTier: the class that vLLM loads, a SecondaryTierManager. It passes vLLM's calls on and translates the answers.

Imports vLLM; nothing else in `kvpool_client` imports this module. Made by vLLM's factory in the scheduler's process; its front
ends import it for the metrics' definitions.

Invariant: once the tier exists, no call raises into vLLM's scheduler, and none but `drain_jobs` and `shutdown` waits: vLLM
guards none of them, and an exception would end the engine. The scheduler's thread.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpool_client.vllm.tier.identity import Engine
from kvpool_client.vllm.tier.metrics import definitions, put_counts
from kvpool_client.vllm.tier.settings import Settings
from kvpool_client.vllm.tier.tier_jobs import Finished, TierJobs


class KVPoolTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM's class is untyped here
    """See the module. Configured by its entry in `secondary_tiers`; raises ConfigError where that is wrong."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        given = Settings.of(settings)
        self.locality = Locality(given.locality) if given.locality else None
        self._jobs = TierJobs(given, offloading_spec, primary_kv_view, Engine.of_caller())
        self._guard = self._jobs.guard

    def __repr__(self) -> str:
        return f"<KVPoolTier {self._jobs!r}>"

    def on_new_request(self, req_context: Any) -> Any:
        """Read the hints of a request that has arrived."""
        has_all = self._guard.call("on_new_request", False, self._jobs.begin_request, req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if has_all else OffloadPolicy.CHUNK_LEVEL)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk can be loaded."""
        is_there = self._guard.call("lookup", False, self._jobs.has, key, req_context)
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Fill rows of the region."""
        self._guard.call("submit_load", None, self._jobs.submit_load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        """Store rows of the region."""
        self._guard.call("submit_store", None, self._jobs.submit_store, job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that have ended since the last call."""
        found: list[Finished] = self._guard.call("get_finished_jobs", [], self._jobs.take_finished)
        return [self._result_of(one) for one in found]

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """A step was scheduled."""
        if not self._jobs.weights.has_kv:
            self._guard.call("on_schedule_end", None, self._jobs.weights.end_step)

    def on_request_finished(self, req_context: Any) -> None:
        """A request has ended, and its jobs were submitted."""
        self._guard.call("on_request_finished", None, self._jobs.end_request, req_context)

    def drain_jobs(self) -> None:
        """End all jobs, and find nothing older from now on: vLLM's cache is being reset. Waits."""
        self._guard.call("drain_jobs", None, self._jobs.drain)

    def shutdown(self) -> None:
        """End all jobs and the connection. Waits for copies that run."""
        self._guard.call("shutdown", None, self._jobs.close)

    def get_stats(self) -> Any:
        """What was counted since the last call, for vLLM's metrics; None for nothing."""
        counts = self._guard.call("get_stats", None, self._jobs.take_counts)
        return None if counts is None else put_counts(counts, OffloadingConnectorStats())

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's signature
        """The definition of each metric."""
        return definitions(OffloadingCounterMetadata)

    @staticmethod
    def _result_of(one: Finished) -> Any:
        # With success vLLM takes every key for loaded, whichever are named.
        return JobResult(
            one.job_id, one.is_whole, None if one.is_whole else one.good or None, transfer_time=one.seconds
        )
