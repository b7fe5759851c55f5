"""KVPoolConnector: the class that vLLM loads. It passes vLLM's calls to one of the two halves and does nothing else.

vLLM imports this module and takes the class by name. It has to derive from vLLM's base, so it is made at that moment
(`__getattr__`): importing the module imports neither vLLM nor torch, and without vLLM only asking for the class fails. The
records that cross between processes are declared to vLLM's abstract classes there and then.

Invariant: no call raises into the engine once the connector exists. Scheduler's and workers' threads, each its own object.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial

from kvpool.clock import NS_PER_S
from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.keys import namespace_name
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.flushing import flush_model
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.pool import Pool
from kvpool_client.vllm import one_child, plugin
from kvpool_client.vllm.event_feed import feed_of
from kvpool_client.vllm.identity.engine_form import engine_form
from kvpool_client.vllm.identity.engine_pool import engine_pool
from kvpool_client.vllm.identity.engine_process import is_stepped_while_idle, worker_here
from kvpool_client.vllm.identity.geometry import geometry_of
from kvpool_client.vllm.identity.identity import model_name
from kvpool_client.vllm.identity.parts import align_tokens, has_states
from kvpool_client.vllm.identity.role import Role
from kvpool_client.vllm.late_start import NamedStart, StagedStart
from kvpool_client.vllm.plan import NO_PLAN, StepPlan, StepReport
from kvpool_client.vllm.prometheus import MakeMetric, PrometheusCounters
from kvpool_client.vllm.ranks.stage_layers import (
    STAGED_GROUPS,
    StageLayers,
    needs_stage_layers,
    own_layers,
)
from kvpool_client.vllm.ranks.stages import stage_count
from kvpool_client.vllm.scheduler.scheduler import SchedulerHalf
from kvpool_client.vllm.settings import PREFIX, Settings
from kvpool_client.vllm.statistics import KVPoolStats, Number, engine_sources
from kvpool_client.vllm.support import Unserved, code_of
from kvpool_client.vllm.surface import (
    BlockPool,
    CacheConfig,
    EngineBlocks,
    EngineConfig,
    EngineOutput,
    EngineRequest,
    EngineStep,
)
from kvpool_client.vllm.timed_calls import LOG, Answer
from kvpool_client.vllm.worker.micro_batches import MicroBatches
from kvpool_client.vllm.worker.off import AbsentWorker
from kvpool_client.vllm.worker.sync_loads import served_loads
from kvpool_client.vllm.worker.weight_watch import watch_weights
from kvpool_client.vllm.worker.worker import WorkerHalf
from kvpool_client.vllm.worker.worker_calls import BEGIN, WorkerCalls

# Time spent inside the connector is reported with other numbers, or alone above this: each report costs vLLM time.
REPORT_NS = NS_PER_S // 10
# The call by which vLLM hands what the workers show to the scheduler.
HANDSHAKE = "set_xfer_handshake_metadata_pp_aware"
# Gives the model's name and its revision, once they are known.
FindName = Callable[[], tuple[str, str] | None]
UNKNOWN_STAGES = "the layers of all pipeline stages are not known yet"


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
    results = getattr(base, "KVConnectorTransferResults", None)  # of releases that ask for them
    return type(plugin.NAME, bases, {"__module__": __name__, "__doc__": __doc__, "_transfer_results": results})


class ConnectorCalls(WorkerCalls):
    """vLLM's calls, each handed to the half that this object is; without a pool each answers as an empty pool does."""

    def __init__(self, vllm_config: EngineConfig, role: Enum, kv_cache_config: CacheConfig) -> None:
        """Raises ConfigError for `kvpool.*` keys that are wrong; an engine that kvpool cannot serve runs without it."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._model, self._revision = "", ""
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), LOG)
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            self._guard.warn_once(
                "kv_load_failure_policy is not 'recompute'", "a load that fails will fail its request"
            )
        # What plans have for the workers until these report.
        self._unsent_layers: StageLayers | None = None
        self._unsent_name: tuple[str, str] | None = None
        if role.name == "WORKER":
            watch_weights()
        self._start(vllm_config, role.name, kv_cache_config)

    def _start(
        self,
        config: EngineConfig,
        role: str,
        caches: CacheConfig,
        *,
        find: Callable[[], StageLayers] | None = None,
        name: FindName | None = None,
    ) -> None:
        """Make the half of this process, or have it wait: for the layers of all stages, which `find` then finds, and for the
        model's name, which `name` does."""
        try:
            self._make_half(config, role, caches, find=find, name=name)
        except (LayoutMismatch, InvalidArgument, OSError) as error:
            self._say_refusal(error, role)
            self._refused.count(f"refusals_{code_of(error)}")
            one_child.release(self)
            if role == "WORKER":
                # The scheduler's half may still plan, and vLLM would wait for what it has planned.
                rank = getattr(config.parallel_config, "rank", 0)
                self._worker = AbsentWorker(str(error), rank)

    def _say_refusal(self, error: Exception, role: str) -> None:
        if code_of(error) != one_child.CODE:
            self._guard.warn_once("the engine runs without a pool", str(error))
        elif role == "SCHEDULER":  # its workers are refused too, and the first connector has the pool
            self._guard.warn_once("a second connector of kvpool's does nothing", str(error))

    def _make_half(
        self,
        config: EngineConfig,
        role: str,
        caches: CacheConfig,
        *,
        find: Callable[[], StageLayers] | None,
        name: FindName | None,
    ) -> None:
        guard = self._guard
        transfer = config.kv_transfer_config
        if find is None:
            rank = getattr(config.parallel_config, "rank", 0)
            one_child.claim(self, getattr(transfer, "engine_id", None), role, rank)
            if needs_stage_layers(config, caches, head_groups=self._settings.head_groups):
                self._await_stages(config, role, caches)
                return
        layers = find() if find is not None else None
        chunk_tokens = self._settings.chunk_tokens_for(align_tokens(caches), has_states=has_states(caches))
        geometry = geometry_of(
            config,
            caches,
            chunk_tokens,
            partial(engine_form, config),
            head_groups=self._settings.head_groups,
            stage_layers=layers,
        )
        settings, reason = served_loads(self._settings, config, may_cut_hits=geometry.may_cut_hits)
        if reason:
            guard.warn_once("kvpool.load is 'sync', and loads run between steps ('async') nevertheless", reason)
        begin = partial(self._start, config, role, caches, find=find)
        known = name() if name is not None else self._name_now(config, role, begin)
        if known is None:
            return
        self._model, self._revision = known
        LOG.info("kvpool: %s of model %s, chunks of %d tokens, %r", role, self._name, chunk_tokens, settings)
        if role == "SCHEDULER":
            feed = feed_of(config, geometry, guard, self._connect) if settings.events else None
            role_of = Role.of(transfer.kv_role)
            pool = self._connect(geometry.layout)
            self._scheduler = SchedulerHalf(pool, geometry, settings, guard, feed=feed, role=role_of)
            self._unsent_layers = layers
            return
        rank = config.parallel_config.rank
        self._rank, self._micro_batches = rank, MicroBatches.of(config.parallel_config)
        of_rank = partial(self._connect, geometry.shard(rank), geometry.share_of(rank))
        self._worker = WorkerHalf(of_rank, geometry, settings, guard, rank=rank)

    def _await_stages(self, config: EngineConfig, role: str, caches: CacheConfig) -> None:
        """Show this stage's layers, and go on with those of all. Raises Unserved."""
        if not hasattr(super(), HANDSHAKE):
            raise Unserved(
                STAGED_GROUPS, f"this vLLM's connectors have no {HANDSHAKE}, by which stages show their layers"
            )
        self._late = StagedStart(own_layers(caches), partial(self._start, config, role, caches))
        if role == "WORKER":
            self._worker = AbsentWorker(UNKNOWN_STAGES, config.parallel_config.rank)

    def _name_now(self, config: EngineConfig, role: str, begin: Callable[..., None]) -> tuple[str, str] | None:
        """The model's name, if it is known soon: else None, and the start waits for it. Raises Unserved.

        Only the scheduler's process reads files: workers take the name from its plans.
        """
        name = model_name(config, self._settings.model)
        if not name.revision.readings:
            return name.find()
        if role == "WORKER":
            self._late = NamedStart(name, begin)
            self._worker = AbsentWorker("", config.parallel_config.rank)
            return None
        name.revision.begin_reading(self._reader)
        known = self._unsent_name = name.find()
        if known is None:
            self._late = NamedStart(name, begin)
            size = name.revision.size
            LOG.info(
                "kvpool: reading %d bytes of weights, nothing is loaded or saved until their digest is known", size
            )
        return known

    def _take_name(self) -> None:
        """Begin once the scheduler's process has read the files of the weights."""
        late = self._late
        if not isinstance(late, NamedStart) or not late.is_ready:
            return
        self._late = None
        self._refused.count("weights_bytes_read", late.take_read_bytes())
        self._timed(BEGIN, None, lambda read: read.start_half(name=read.name.find), late)
        if self._scheduler is None:
            return
        self._unsent_name = self._model, self._revision
        if late.blocks is not None:
            self.bind_gpu_block_pool(late.blocks)
        if late.has_new_weights:
            self.reset_cache()

    @property
    def _name(self) -> str:
        return namespace_name(self._model, self._revision)

    def _connect(self, layout: Layout, share: Share | tuple[Share, ...] | None = None) -> Pool:
        return engine_pool(self._settings, layout, share, model=self._model, revision=self._revision)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing else."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:  # noqa: ARG003 - vLLM's interface
        """Nothing of the pool's is left on the engine's KV while it sleeps (`unregister_kv_caches`)."""
        return True

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

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """What the workers have shown: with the layers of all stages a hybrid model's scheduler begins."""
        awaited = self._late
        if not isinstance(awaited, StagedStart) or self._worker is not None:
            return
        self._late = None
        count = stage_count(self._vllm_config.parallel_config)  # type: ignore[attr-defined]  # vLLM's base has it
        layers = partial(StageLayers.of_workers, metadata, count)
        self._timed(BEGIN, None, lambda shown: shown.start_half(find=layers), awaited)
        if awaited.blocks is not None:
            self.bind_gpu_block_pool(awaited.blocks)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's blocks: the scheduler's half holds what is being saved, and evicts what a failed load has left without KV."""
        if self._late is not None:
            self._late.blocks = gpu_block_pool
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
        if self._late is not None:
            self._take_name()
        half = self._scheduler
        plan = NO_PLAN if half is None else self._timed("plan", NO_PLAN, half.plan, scheduler_output)
        if self._unsent_layers is None and self._unsent_name is None:
            return plan
        return plan._replace(stage_layers=self._unsent_layers, name=self._unsent_name)

    def update_connector_output(self, connector_output: EngineOutput) -> None:
        """See SchedulerHalf.ended."""
        if connector_output.kv_connector_worker_meta is not None:
            self._unsent_layers = self._unsent_name = None
        if self._scheduler is not None:
            self._timed("end of a step", None, self._scheduler.ended, connector_output)

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
        if self._scheduler is None or not self._scheduler.has_feed:
            return nothing
        return self._of_scheduler("events", nothing, lambda half: half.take_events())

    def reset_cache(self) -> bool:
        """Find no chunk that was stored before, and drop the model's chunks for all engines where `kvpool.reset` asks for
        it."""
        if self._scheduler is None:
            if isinstance(self._late, NamedStart):
                self._late.has_new_weights = True
            return True
        is_new = self._of_scheduler("new weights", False, lambda half: half.renew())
        if self._settings.reset == "node":
            failure = self._guard.call("reset", "see above", self._flush_model)
            remedy = f"this engine finds none of them, other engines do: kvpoolctl flush --model {self._name}"
            if failure:
                event = "chunks of the model are left in the pool, though kvpool.reset is 'node'"
                self._guard.warn_once(event, f"{failure}; {remedy}")
        return is_new

    def _flush_model(self) -> str:
        return flush_model(self._settings.socket, self._name, self._settings.timeout_s)

    # --- both ---

    def get_kv_connector_stats(self) -> KVPoolStats | None:
        """Counts since the last call."""
        if isinstance(self._late, NamedStart) and self._worker is None:
            self._refused.count("weights_bytes_read", self._late.take_read_bytes())
        half = self._scheduler or self._worker
        refused = self._refused.take_counts() if self._refused.has_news else None
        if half is None or not (half.tally.has_news or self._inside_ns >= REPORT_NS):
            return refused
        half.tally.count("engine_seconds", self._inside_ns / NS_PER_S)
        self._inside_ns = 0
        counted = half.tally.take_counts()
        return counted.aggregate(refused) if counted is not None and refused is not None else counted or refused

    def shutdown(self) -> None:
        """End threads and connections."""
        self._of_scheduler("shutdown", None, lambda half: half.close())
        self._of_worker("shutdown", None, lambda half: half.close())
        self._reader.stop()
        one_child.release(self)

    def _drain_worker_here(self, timeout_s: float) -> Mapping[int, int]:
        worker = worker_here()
        return worker.drain_saves(timeout_s) if isinstance(worker, ConnectorCalls) else {}

    def _of_scheduler(self, what: str, default: Answer, ask: Callable[[SchedulerHalf], Answer]) -> Answer:
        half = self._scheduler
        return default if half is None else self._timed(what, default, ask, half)
