"""Worker calls: vLLM's calls to the connector of a worker, each handed to its half. The thread that runs the model."""

from collections.abc import Callable, Mapping

from kvpool_client.vllm.late_start import LateStart
from kvpool_client.vllm.plan import StepPlan, StepReport
from kvpool_client.vllm.ranks.placement import SEVERAL_NODES, fault_of_node, node_name
from kvpool_client.vllm.ranks.stage_layers import OwnLayers
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.support import OTHER
from kvpool_client.vllm.surface import Tensor
from kvpool_client.vllm.timed_calls import Answer, TimedCalls
from kvpool_client.vllm.worker.micro_batches import MicroBatches
from kvpool_client.vllm.worker.off import AbsentWorker
from kvpool_client.vllm.worker.worker import WorkerHalf

BEGIN = "a late start"


class WorkerCalls(TimedCalls):
    """See the module. Without a half each answers as an empty pool does.

    `_quiet`: the half, where this step has no work and nothing is under way or to be reported, as in most decoding steps. The
    calls of such a step do little else than look here: a forward pass has evicted whatever they would look at.
    """

    # vLLM's record of what `get_transfer_results` returns.
    _transfer_results: Callable[..., object]

    def __init__(self, **of_engine: object) -> None:
        super().__init__(**of_engine)
        self._worker: WorkerHalf | AbsentWorker | None = None
        self._refused = Tally()
        self._rank, self._micro_batches = 0, MicroBatches(1)
        self._scheduler_node = ""  # as it was checked last
        self._quiet: WorkerHalf | None = None
        self._late: LateStart | None = None
        self._tensors: Mapping[str, Tensor] | None = None  # the KV that vLLM has registered
        self._has_memory = True  # whether they have any, that is, the engine is not asleep

    @property
    def has_worker(self) -> bool:
        """Whether this is the half of a worker: one without a pool, or that has none yet, ends the saves that it is given."""
        return self._worker is not None

    def drain_saves(self, timeout_s: float) -> Mapping[int, int]:
        """See WorkerHalf.drain. Not called by vLLM, but by the scheduler's half where both are in one process."""
        none: dict[int, int] = {}
        return self._of_worker("ending saves", none, lambda half: half.drain(timeout_s))

    def get_handshake_metadata(self) -> OwnLayers | None:
        """The layers of a stage of a hybrid model, for the scheduler."""
        return self._late.own if self._late is not None else None

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """See WorkerHalf.register."""
        self._tensors = kv_caches
        is_registered = self._of_worker("registering KV caches", False, lambda half: half.register(kv_caches))
        if self._worker is not None and not is_registered:
            self._refused.count(f"refusals_{OTHER}")

    def unregister_kv_caches(self) -> None:
        """vLLM takes the memory of its KV away, to sleep: see WorkerHalf.unregister."""
        self._has_memory = False
        self._of_worker("unregistering KV caches", None, lambda half: half.unregister())

    def restore_kv_caches(self) -> None:
        """The memory is there again, at the same addresses: register the same tensors, at a new Pool."""
        if not self._has_memory:
            self._has_memory = True
            self._register_known()

    def note_new_weights(self) -> None:
        """The weights have been changed in place, by a call that connectors do not see."""
        self._of_worker("new weights", None, lambda half: half.note_new_weights())

    def _register_known(self) -> None:
        if self._tensors is not None:
            self.register_kv_caches(self._tensors)

    def handle_preemptions(self, kv_connector_metadata: object) -> None:  # noqa: ARG002 - vLLM's interface
        """Other requests are about to write to blocks: no copy of the step before may read them."""
        if self._quiet is None:
            self._of_worker("preemption", None, lambda half: half.drop_saves())

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]  # vLLM's base
        if not isinstance(connector_metadata, StepPlan):
            return
        is_here = connector_metadata.node == self._scheduler_node
        if self._quiet is not None and is_here and self._quiet.stays_quiet(connector_metadata):
            return
        self._quiet = None
        self._micro_batches.begin_step()
        if self._late is not None:
            self._begin_late(connector_metadata)
        if not is_here:
            self._check_node(connector_metadata.node)
        self._of_worker("begin of a step", None, lambda half: half.begin_step(connector_metadata))
        if isinstance(self._worker, WorkerHalf) and self._worker.is_quiet:
            self._quiet = self._worker

    def _begin_late(self, plan: StepPlan) -> None:
        """Begin with what the plan has, if that was awaited."""
        while (late := self._late) is not None and (start := late.start_with(plan)) is not None:
            self._late, before = None, self._worker
            self._timed(BEGIN, None, lambda begin: begin(), start)
            if before is not None and self._worker is not None:
                self._worker.weights = before.weights
            if self._has_memory:
                self._register_known()
            else:
                self.unregister_kv_caches()

    def start_load_kv(self, forward_context: object, **_kwargs: object) -> None:  # noqa: ARG002 - vLLM's interface
        """See WorkerHalf.start_loads."""
        if self._quiet is None:
            self._of_worker("starting loads", None, lambda half: half.start_loads())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See WorkerHalf.wait_layer."""
        if self._quiet is None and self._worker is not None and self._worker.loads_by_layer:
            self._of_worker("waiting for a layer", None, lambda half: half.wait_layer(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **_kwargs: object) -> None:  # noqa: ARG002 - vLLM's interface
        """See WorkerHalf.save_layer, once for all micro-batches."""
        if self._quiet is not None or self._worker is None or not self._worker.saves_by_layer:
            return
        if self._micro_batches.has_written(layer_name):
            self._of_worker("saving a layer", None, lambda half: half.save_layer(layer_name))

    def wait_for_save(self) -> None:
        """See WorkerHalf.end_forward."""
        if self._quiet is None:
            self._of_worker("end of a forward pass", None, lambda half: half.end_forward())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:  # noqa: ARG002 - vLLM's interface
        """Loads that have ended since the last call; no request waits for its saves."""
        if self._quiet is not None:
            return None, None
        nobody: set[str] = set()
        return None, self._of_worker("ended loads", nobody, lambda half: half.take_finished()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> object:
        """As `get_finished`, with the requests whose loads have failed; vLLM computes all of their tokens."""
        if self._quiet is not None:
            return self._transfer_results()
        _, received = self.get_finished(finished_req_ids)
        nobody: set[str] = set()
        failed = self._of_worker("failed loads", nobody, lambda half: half.take_failed())
        return self._transfer_results(finished_recving=received or nobody, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerHalf.take_bad_blocks."""
        none: set[int] = set()
        return (
            none
            if self._quiet is not None
            else self._of_worker("load errors", none, lambda half: half.take_bad_blocks())
        )

    def build_connector_worker_meta(self) -> StepReport | None:
        """The report of the step for the scheduler's half."""
        if self._quiet is not None:
            return self._quiet.report()
        return self._of_worker("report", None, lambda half: half.report())

    def _check_node(self, scheduler: str) -> None:
        """A rank on another node than its scheduler cannot claim the scheduler's leases: it ends its orders and logs why."""
        self._scheduler_node = scheduler
        reason = fault_of_node(self._rank, here=node_name(), scheduler=scheduler)
        if reason and isinstance(self._worker, WorkerHalf):
            self._worker.close()
            self._worker = AbsentWorker(reason, self._rank)
            self._refused.count(f"refusals_{SEVERAL_NODES}")

    def _of_worker(self, what: str, default: Answer, ask: Callable[[WorkerHalf | AbsentWorker], Answer]) -> Answer:
        half = self._worker
        return default if half is None else self._timed(what, default, ask, half)
