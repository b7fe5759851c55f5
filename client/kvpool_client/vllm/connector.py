"""KVPoolConnector: the class that vLLM loads. It passes vLLM's calls to one of the two halves and does nothing else.

vLLM imports this module and takes the class by name. It has to derive from vLLM's base, so it is made at that moment
(`__getattr__`): importing the module imports neither vLLM nor torch, and without vLLM only asking for the class fails. The
records that cross between processes are declared to vLLM's abstract classes there and then.

Invariant: no call raises into the engine once the connector exists. Scheduler's and workers' threads, each its own object.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import TypeVar

from kvpool.clock import NS_PER_S, MonotonicClock
from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.keys import namespace_name
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.pool import Pool
from kvpool_client.vllm import one_child, plugin
from kvpool_client.vllm.event_feed import EventFeed, maker_of
from kvpool_client.vllm.flushing import flush_model
from kvpool_client.vllm.identity.engine_form import engine_form
from kvpool_client.vllm.identity.engine_pool import engine_pool
from kvpool_client.vllm.identity.engine_process import is_stepped_while_idle, worker_here
from kvpool_client.vllm.identity.geometry import Geometry, geometry_of
from kvpool_client.vllm.identity.identity import model_and_revision
from kvpool_client.vllm.identity.parts import align_tokens, has_states, needs_groups
from kvpool_client.vllm.identity.role import Role
from kvpool_client.vllm.plan import StepPlan, StepReport
from kvpool_client.vllm.prometheus import MakeMetric, PrometheusCounters
from kvpool_client.vllm.ranks.placement import SEVERAL_NODES, fault_of_node, node_name
from kvpool_client.vllm.scheduler.scheduler import SchedulerHalf
from kvpool_client.vllm.settings import PREFIX, Settings
from kvpool_client.vllm.statistics import KVPoolStats, Number, Tally, engine_sources
from kvpool_client.vllm.support import OTHER, code_of
from kvpool_client.vllm.surface import (
    BlockPool,
    CacheConfig,
    EngineBlocks,
    EngineConfig,
    EngineOutput,
    EngineRequest,
    EngineStep,
)
from kvpool_client.vllm.worker.micro_batches import MicroBatches
from kvpool_client.vllm.worker.off import AbsentWorker
from kvpool_client.vllm.worker.sync_loads import served_loads
from kvpool_client.vllm.worker.tensor_views import Tensor
from kvpool_client.vllm.worker.worker import WorkerHalf

Answer = TypeVar("Answer")

# A child of vLLM's logger, because vLLM configures no other.
LOG = logging.getLogger("vllm.kvpool")

# Time spent inside the connector is reported with other numbers, or alone above this: each report costs vLLM time.
REPORT_NS = NS_PER_S // 10


def __getattr__(name: str) -> object:
    if name == plugin.NAME:
        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def connector_class() -> type:
    """The class, made once. Imports vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # the engine that asks for it

    base.KVConnectorMetadata.register(StepPlan)
    base.KVConnectorWorkerMetadata.register(StepReport)
    plugin.register()
    bases = (ConnectorCalls, base.KVConnectorBase_V1, base.SupportsHMA)
    return type(plugin.NAME, bases, {"__module__": __name__, "__doc__": __doc__})


class ConnectorCalls:
    """vLLM's calls, each handed to the half that this object is; without a pool each answers as an empty pool does."""

    def __init__(self, vllm_config: EngineConfig, role: Enum, kv_cache_config: CacheConfig) -> None:
        """Raises ConfigError for `kvpool.*` keys that are wrong; an engine that kvpool cannot serve runs without it."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)  # type: ignore[call-arg]  # vLLM's base
        self._guard = FailureGuard(LOG)
        self._clock = MonotonicClock()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | AbsentWorker | None = None
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._model, self._revision = "", ""
        self._refused = Tally()
        self._rank, self._micro_batches = 0, MicroBatches(1)
        self._has_groups = self._guard.call("reading KV cache groups", True, lambda: needs_groups(kv_cache_config))
        self._is_quiet, self._inside_ns = False, 0
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            self._guard.warn_once(
                "kv_load_failure_policy is not 'recompute'", "a load that fails will fail its request"
            )
        try:
            self._make_half(vllm_config, role.name, kv_cache_config)
        except (LayoutMismatch, InvalidArgument, OSError) as error:
            self._say_refusal(error, role.name)
            self._refused.add(f"refusals_{code_of(error)}")
            one_child.release(self)
            if role.name == "WORKER":
                # The scheduler's half may still plan, and vLLM would wait for what it has planned.
                rank = getattr(vllm_config.parallel_config, "rank", 0)
                self._worker = AbsentWorker(str(error), rank, has_groups=self._has_groups)

    def _say_refusal(self, error: Exception, role: str) -> None:
        if code_of(error) != one_child.CODE:
            self._guard.warn_once("the engine runs without a pool", str(error))
        elif role == "SCHEDULER":  # its workers are refused too, and the first connector has the pool
            self._guard.warn_once("a second connector of kvpool's does nothing", str(error))

    def _make_half(self, config: EngineConfig, role: str, caches: CacheConfig) -> None:
        guard = self._guard
        transfer = config.kv_transfer_config
        one_child.claim(self, getattr(transfer, "engine_id", None), role, getattr(config.parallel_config, "rank", 0))
        chunk_tokens = self._settings.chunk_tokens_for(align_tokens(caches), has_states=has_states(caches))
        geometry = geometry_of(
            config, caches, chunk_tokens, partial(engine_form, config), head_groups=self._settings.head_groups
        )
        settings, reason = served_loads(self._settings, config, has_groups=geometry.has_groups)
        if reason:
            guard.warn_once("kvpool.load is 'sync', and loads run between steps ('async') nevertheless", reason)
        self._model, self._revision = model_and_revision(config, settings.model)
        LOG.info("kvpool: %s of model %s, chunks of %d tokens, %r", role, self._name, chunk_tokens, settings)
        if role == "SCHEDULER":
            feed = self._make_feed(geometry) if settings.events and self._publishes_events(config) else None
            role_of = Role.of(transfer.kv_role)
            pool = self._connect(geometry.layout)
            self._scheduler = SchedulerHalf(pool, geometry, settings, guard, feed=feed, role=role_of)
            return
        rank = config.parallel_config.rank
        self._rank, self._micro_batches = rank, MicroBatches.of(config.parallel_config)
        of_rank = partial(self._connect, geometry.shard(rank), geometry.share_of(rank))
        self._worker = WorkerHalf(of_rank, geometry, settings, guard, rank=rank)

    def _check_node(self, scheduler: str) -> None:
        """A rank on another node than its scheduler cannot claim the scheduler's leases: it ends its orders and logs why."""
        reason = fault_of_node(self._rank, here=node_name(), scheduler=scheduler)
        if reason and isinstance(self._worker, WorkerHalf):
            self._worker.close()
            self._worker = AbsentWorker(reason, self._rank, has_groups=self._has_groups)
            self._refused.add(f"refusals_{SEVERAL_NODES}")

    def _make_feed(self, geometry: Geometry) -> EventFeed:
        """The event feed, with a connection of its own, so that no answer of a megabyte delays a lookup's."""
        from vllm.distributed import kv_events  # the engine that asks for it

        pool, part = self._connect(geometry.layout), geometry.event_part
        make = maker_of(kv_events, part.table if geometry.has_groups else None)
        return EventFeed(pool, make, part.block_tokens, self._guard)

    def _publishes_events(self, config: EngineConfig) -> bool:
        is_on = bool(getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False))
        if not is_on:
            self._guard.warn_once(
                "kvpool.events is on and vLLM's KV events are not", "the pool's are published to nobody"
            )
        return is_on

    @property
    def _name(self) -> str:
        return namespace_name(self._model, self._revision)

    def _connect(self, layout: Layout, share: Share | tuple[Share, ...] | None = None) -> Pool:
        return engine_pool(self._settings, self._guard, layout, share, model=self._model, revision=self._revision)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing else."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """A head's bytes in a row, where ranks of engines of other sizes take them one by one."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return "LBHNC" if extra.get(PREFIX + "head_groups") else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, object]) -> bool:
        """Synchronous loads are waited for between layers; saves and asynchronous loads need no stop there."""
        return extra_config.get(PREFIX + "load") == "sync"

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Number] | None = None) -> KVPoolStats:
        """Statistics from their serialized form."""
        return KVPoolStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,  # noqa: ARG003 - vLLM's interface
        metric_types: Mapping[type, MakeMetric],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> PrometheusCounters:
        """The same numbers for vLLM's `/metrics`."""
        return PrometheusCounters(metric_types, labelnames, per_engine_labelvalues)

    # --- the scheduler's side ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's blocks: the scheduler's half holds what is being saved, and evicts what a failed load has left without KV."""
        idle = is_stepped_while_idle() and hasattr(super(), "has_pending_push_work")
        drain = self._drain_worker_here if worker_here() is not None else None
        self._of_scheduler(
            "binding blocks",
            None,
            lambda half: half.bind_blocks(gpu_block_pool, drain=drain, is_stepped_while_idle=idle),
        )

    def has_pending_push_work(self) -> bool:
        """See SchedulerHalf.has_saves."""
        return self._of_scheduler("saves under way", False, lambda half: half.has_saves())

    def has_pending_block_frees(self) -> bool:
        """See SchedulerHalf.may_soon_free_blocks."""
        return self._of_scheduler("saves under way", False, lambda half: half.may_soon_free_blocks())

    def on_new_request(self, request: EngineRequest) -> None:
        """See SchedulerHalf.arrived."""
        self._of_scheduler("arrival", None, lambda half: half.arrived(request))

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See SchedulerHalf.matched_tokens."""
        nothing: tuple[int | None, bool] = (0, False)
        return self._of_scheduler("lookup", nothing, lambda half: half.matched_tokens(request, num_computed_tokens))

    def get_external_cache_hit_sources(self, request: EngineRequest, num_external_tokens: int) -> dict[object, int]:
        """The tokens of the last load by vLLM's names of the tiers."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # the engine that asks for it

        none: dict[str, int] = {}
        found = self._of_scheduler("hit sources", none, lambda half: half.hit_sources(request))
        return {CacheHitSource[name]: tokens for name, tokens in engine_sources(found, num_external_tokens).items()}

    def update_state_after_alloc(self, request: EngineRequest, blocks: EngineBlocks, num_external_tokens: int) -> None:
        """See SchedulerHalf.allocated."""
        self._of_scheduler("allocation", None, lambda half: half.allocated(request, blocks, num_external_tokens))

    def build_connector_meta(self, scheduler_output: EngineStep) -> StepPlan:
        """See SchedulerHalf.plan."""
        return self._of_scheduler("plan", StepPlan(0), lambda half: half.plan(scheduler_output))

    def update_connector_output(self, connector_output: EngineOutput) -> None:
        """See SchedulerHalf.ended."""
        self._of_scheduler("end of a step", None, lambda half: half.ended(connector_output))

    def request_finished(self, request: EngineRequest, block_ids: object) -> tuple[bool, dict[str, object] | None]:  # noqa: ARG002 - vLLM's interface
        """The blocks may be freed at once: a save holds references to the blocks that it reads. Returns the answer to the
        request's hints."""
        return False, self._of_scheduler("end of a request", None, lambda half: half.finished(request))

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: object
    ) -> tuple[bool, dict[str, object] | None]:
        """As `request_finished`, for every group."""
        return self.request_finished(request, block_ids)

    def take_events(self) -> list[object]:
        """See SchedulerHalf.take_events."""
        nothing: list[object] = []
        return self._of_scheduler("events", nothing, lambda half: half.take_events())

    def reset_cache(self) -> bool:
        """Find no chunk that was stored before, and drop the model's chunks for all engines where `kvpool.reset` asks for
        it."""
        if self._scheduler is None:
            return True
        is_new = self._of_scheduler("new weights", False, lambda half: half.renew())
        if self._settings.reset == "node":
            failure = self._guard.call("reset", "see above", lambda: flush_model(self._settings, self._name))
            remedy = f"this engine finds none of them, other engines do: kvpoolctl flush --model {self._name}"
            if failure:
                event = "chunks of the model are left in the pool, though kvpool.reset is 'node'"
                self._guard.warn_once(event, f"{failure}; {remedy}")
        return is_new

    # --- the worker's side ---

    @property
    def has_worker(self) -> bool:
        """Whether this is the half of a worker that has KV."""
        return isinstance(self._worker, WorkerHalf)

    def drain_saves(self, timeout_s: float) -> Mapping[int, int]:
        """See WorkerHalf.drain. Not called by vLLM, but by the scheduler's half where both are in one process."""
        none: dict[int, int] = {}
        return self._of_worker("ending saves", none, lambda half: half.drain(timeout_s))

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """See WorkerHalf.register."""
        is_registered = self._of_worker("registering KV caches", False, lambda half: half.register(kv_caches))
        if self._worker is not None and not is_registered:
            self._refused.add(f"refusals_{OTHER}")

    def handle_preemptions(self, kv_connector_metadata: object) -> None:  # noqa: ARG002 - vLLM's interface
        """Other requests are about to write to blocks: no copy of the step before may read them."""
        if not self._is_quiet:
            self._of_worker("preemption", None, lambda half: half.drop_saves())

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]  # vLLM's base
        if isinstance(connector_metadata, StepPlan):
            self._micro_batches.begin()
            self._check_node(connector_metadata.node)
            self._of_worker("begin of a step", None, lambda half: half.begin(connector_metadata))
            self._is_quiet = self._worker is not None and self._worker.is_quiet

    def start_load_kv(self, forward_context: object, **_kwargs: object) -> None:  # noqa: ARG002 - vLLM's interface
        """See WorkerHalf.start_loads."""
        if not self._is_quiet:
            self._of_worker("starting loads", None, lambda half: half.start_loads())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See WorkerHalf.wait_layer."""
        if self._worker is not None and self._worker.loads_by_layer:
            self._of_worker("waiting for a layer", None, lambda half: half.wait_layer(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **_kwargs: object) -> None:  # noqa: ARG002 - vLLM's interface
        """See WorkerHalf.save_layer, once for all micro-batches."""
        if self._worker is None or not self._worker.saves_by_layer or not self._micro_batches.has_written(layer_name):
            return
        self._of_worker("saving a layer", None, lambda half: half.save_layer(layer_name))

    def wait_for_save(self) -> None:
        """See WorkerHalf.end_forward."""
        if not self._is_quiet:
            self._of_worker("end of a forward pass", None, lambda half: half.end_forward())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:  # noqa: ARG002 - vLLM's interface
        """Loads that have ended since the last call; no request waits for its saves."""
        if self._is_quiet:
            return None, None
        nobody: set[str] = set()
        return None, self._of_worker("ended loads", nobody, lambda half: half.take_finished()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> object:
        """As `get_finished`, with the requests whose loads have failed; vLLM computes all of their tokens."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import base  # the engine that asks for it

        _, received = self.get_finished(finished_req_ids)
        nobody: set[str] = set()
        failed = nobody if self._is_quiet else self._of_worker("failed loads", nobody, lambda half: half.take_failed())
        return base.KVConnectorTransferResults(finished_recving=received or nobody, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerHalf.take_bad_blocks."""
        none: set[int] = set()
        return none if self._is_quiet else self._of_worker("load errors", none, lambda half: half.take_bad_blocks())

    def build_connector_worker_meta(self) -> StepReport | None:
        """The report of the step for the scheduler's half."""
        if self._is_quiet and self._worker is not None:
            return self._worker.report()
        return self._of_worker("report", None, lambda half: half.report())

    # --- both ---

    def get_kv_connector_stats(self) -> KVPoolStats | None:
        """Counts since the last call."""
        half, refused = self._scheduler or self._worker, self._refused.take()
        if half is None or not (half.tally.has_news or self._inside_ns >= REPORT_NS):
            return refused
        half.tally.add("engine_seconds", self._inside_ns / NS_PER_S)
        self._inside_ns = 0
        counted = half.tally.take()
        return counted.aggregate(refused) if counted is not None and refused is not None else counted or refused

    def shutdown(self) -> None:
        """End threads and connections."""
        self._of_scheduler("shutdown", None, lambda half: half.close())
        self._of_worker("shutdown", None, lambda half: half.close())
        one_child.release(self)

    def _drain_worker_here(self, timeout_s: float) -> Mapping[int, int]:
        worker = worker_here()
        return worker.drain_saves(timeout_s) if isinstance(worker, ConnectorCalls) else {}

    def _of_scheduler(self, what: str, default: Answer, ask: Callable[[SchedulerHalf], Answer]) -> Answer:
        half = self._scheduler
        return default if half is None else self._timed(what, default, lambda: ask(half))

    def _of_worker(self, what: str, default: Answer, ask: Callable[[WorkerHalf | AbsentWorker], Answer]) -> Answer:
        half = self._worker
        return default if half is None else self._timed(what, default, lambda: ask(half))

    def _timed(self, what: str, default: Answer, ask: Callable[[], Answer]) -> Answer:
        begun_ns = self._clock.now_ns()
        answer = self._guard.call(what, default, ask)
        self._inside_ns += self._clock.now_ns() - begun_ns
        return answer
