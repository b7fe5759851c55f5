"""Worker's half of the vLLM connector: loads into and saves from this rank's blocks, by the plan of each step.

Asynchronous loads run on threads of their own between steps; synchronous ones start before the forward pass, which waits
for one layer at a time, and the first call that asks for their outcomes settles them: with a speculative configuration vLLM
asks before the forward pass has ended. `Saver` carries out saves. Invariants: every order is answered once, with an outcome;
after a failed synchronous load nothing is saved until a plan acknowledges the failure, because what was computed since may
depend on KV that never came (vLLM gives no request the blocks of an asynchronous one before it knows its outcome); a load that
was not waited for counts as failed; with weights that the scheduler does not know of nothing is loaded or saved.

The thread that runs the model, but for the load threads.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures

from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import KVPoolError
from kvpool.states import Level
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.pool import Pool
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.plan import NO_PLAN, LoadOutcome, StepPlan, StepReport
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.support import code_of
from kvpool_client.vllm.surface import Tensor
from kvpool_client.vllm.worker.divided_time import DividedTime
from kvpool_client.vllm.worker.engine_memory import EngineMemory
from kvpool_client.vllm.worker.fetch import Fetch, failed
from kvpool_client.vllm.worker.saver import Saver
from kvpool_client.vllm.worker.weight_steps import WeightSteps


class WorkerHalf:
    """See the module. `connect` gives the Pool of this rank's shard, once the engine's tensors are known."""

    def __init__(
        self,
        connect: Callable[[], Pool],
        geometry: Geometry,
        settings: Settings,
        guard: FailureGuard,
        *,
        rank: int,
        clock: Clock | None = None,
    ) -> None:
        self.tally = Tally()
        self.pool: Pool | None = None
        self._connect = connect
        self._geometry = geometry
        self._settings = settings
        self._guard = guard
        self._rank = rank % geometry.ranks.count
        self._ticket = geometry.ranks.ticket_of(rank)
        self._clock = clock or MonotonicClock()
        self._divided = {int(level): DividedTime(self._clock) for level in Level}  # by the lowest tier of a load
        self._memory: EngineMemory | None = None
        self._off = "no KV caches were registered"
        self._layers = geometry.layer_places
        self._threads = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvpool-load")
        self._plan = NO_PLAN
        self._running: list[tuple[Fetch, Future[LoadOutcome]]] = []
        self._sync: list[Fetch] = []
        self._outcomes: dict[str, LoadOutcome] = {}
        self._bad_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._failed_step = 0
        # Layers for which the model was seen to wait before a load is settled; the others are waited for at once.
        self._trusted: set[int] = set()
        self._seen: set[int] = set()
        self._is_settled = True
        self.weights = WeightSteps()
        # Whether there is work at each layer of this step.
        self.loads_by_layer = self.saves_by_layer = False
        # Whether this step has no work, and nothing is under way or to be reported: as in most decoding steps.
        self.is_quiet = False
        self._saver = Saver(
            self.tally,
            guard,
            is_writer=geometry.ranks.is_writer(rank),
            wait_budget_s=settings.timeout_s,
            clock=self._clock,
        )

    def __repr__(self) -> str:
        return f"<WorkerHalf step {self._plan.step}, {len(self._running)} loads, {self.pool!r}>"

    def register(self, tensors: Mapping[str, Tensor]) -> bool:
        """Register the engine's KV. Where it does not fit, this rank runs without a pool, and reports that to the scheduler.

        Returns True: the outcome was logged and counted.
        """
        try:
            self.pool = self.pool or self._connect()
            self._memory = EngineMemory(self.pool, self._geometry, tensors, rank=self._rank)
            self._saver.use_memory(self._memory)
            self._off = ""
        except KVPoolError as error:
            self._off = str(error)
            self._guard.warn_once("this worker has no pool", self._off)
            self.tally.count(f"refusals_{code_of(error)}")
        return True

    def unregister(self) -> None:
        """The engine's KV is about to lose its memory: end every copy from and to it, and all that was registered, the Pool
        included. Until `register`, loads fail and saves end at once.

        Loads under way fail, and those that have ended since the last step: what they have brought goes too. Saves have
        `timeout_s` to end in. Idempotent. Bounded by what a load or a save may take.
        """
        for fetch in self._fetches():
            self._guard.call("cancelling a load", None, fetch.cancel)
        self._settle_sync()
        wait_for_futures([future for _, future in self._running])  # their requests hear of it in the next step
        self._memory = None
        self._saver.leave_memory()
        pool, self.pool, self._off = self.pool, None, ""
        if pool is not None:
            pool.close()

    def note_new_weights(self) -> None:
        """The weights have been changed in place: nothing is loaded or saved until a plan is of a later epoch."""
        self.weights.note_change()
        for fetch in self._fetches():
            self._guard.call("cancelling a load", None, fetch.cancel)

    def stays_quiet(self, plan: StepPlan) -> bool:
        """A step begins: whether it is as quiet as the one before it. If not, `begin_step` has to follow."""
        if plan.loads or plan.saves or plan.cancelled:
            return False
        self._plan = plan
        self.weights.begin_step(plan)
        return True

    def begin_step(self, plan: StepPlan) -> None:
        """A step begins. Give up what an unfinished step has left."""
        is_asked = bool(plan.loads or plan.saves or plan.cancelled)
        self.is_quiet = False
        self._settle_sync()
        self._plan, self._seen, self._is_settled = plan, set(), False
        self.weights.begin_step(plan)
        board = self._saver.board
        if plan.board and not board.has_attached:
            self._guard.call("attaching to the scheduler's memory", None, board.attach, plan.board, self._rank)
        self.saves_by_layer = any(not order.pin for order in plan.saves)
        self.loads_by_layer = not self._settings.is_async or any(not order.is_async for order in plan.loads)
        # With synchronous loads, each step also shows which layers the model waits for before loads are settled.
        if self._settings.is_async and not (
            is_asked
            or self._running
            or self._outcomes
            or self._bad_blocks
            or self._failed_loads
            or self._saver.has_work
        ):
            self.is_quiet = True
            return
        self._saver.begin_step(plan.saves)
        for request_id in plan.cancelled:
            for fetch, _ in self._running:
                if fetch.request_id == request_id:
                    self._guard.call("cancelling a load", None, fetch.cancel)

    def start_loads(self) -> None:
        """Begin the plan's loads: synchronous ones run when this returns, asynchronous ones are queued."""
        for order in self._plan.loads:
            divided = self._divided[max(order.tiers, default=Level.DRAM)]
            fetch = Fetch(order, ticket=self._ticket, clock=self._clock, divided=divided)
            if not self._is_of_these_weights():
                fetch.cancel()
            if order.is_async:
                self._running.append((fetch, self._threads.submit(self._carry_out, fetch)))
                continue
            self._sync.append(fetch)
            self._guard.call("starting a load", None, self._begin_load, fetch)
            for layer in range(len(self._layers)):
                if layer not in self._trusted:
                    self._wait(fetch, layer)

    def wait_layer(self, name: str) -> None:
        """Before the forward pass reads a layer: wait until the synchronous loads have brought it, or have failed."""
        places = self._layers.get(name)
        if places is None:
            return
        layer = places[0][1]
        self._seen.add(layer)
        for fetch in self._sync:
            self._wait(fetch, layer)

    def save_layer(self, name: str) -> None:
        """The forward pass has written a layer: its bytes may be read."""
        if self._plan.saves:
            for place in self._layers.get(name, ()):
                self._saver.layer(place, may_save=self._may_save())

    def end_forward(self) -> None:
        """The forward pass has ended: publish its saves, or give them up."""
        self._settle_sync()
        self._saver.end_step(may_save=self._may_save())

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous load has ended, successfully or not, since the last call."""
        self._settle_sync()
        # A step without tokens only collects what has ended, and the next one follows at once. So it waits a moment, instead of
        # taking the interpreter from the threads that load and save; a new request waits no longer.
        if self._plan.is_idle:
            self._saver.wait_a_moment(future for _, future in self._running)
        # Each is checked once: a load that ends meanwhile is reported by the next call.
        are_done = [future.done() for _, future in self._running]
        ended = [pair for pair, is_done in zip(self._running, are_done, strict=True) if is_done]
        self._running = [pair for pair, is_done in zip(self._running, are_done, strict=True) if not is_done]
        for fetch, future in ended:
            error = future.exception()
            if error is not None:
                self._guard.warn_once(f"a load failed: {type(error).__name__}", str(error))
                fetch.release()
            self._settle_load(fetch, failed(fetch.order, "error") if error is not None else future.result())
        return {fetch.request_id for fetch, _ in ended}

    def take_failed(self) -> set[str]:
        """Requests whose load has failed since the last call, where vLLM is not notified of blocks."""
        taken, self._failed_loads = self._failed_loads, set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a load should have filled and did not, since the last call."""
        self._settle_sync()
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def report(self) -> StepReport:
        """The report of this step for the scheduler's half."""
        if self.is_quiet:
            changed_after = self.weights.changed_after
            return StepReport(self._plan.step, self._failed_step, off=self._off, weights_step=changed_after)
        self._settle_sync()
        self._saver.poll()
        loads, self._outcomes = self._outcomes, {}
        return StepReport(
            step=self._plan.step,
            failed_step=self._failed_step,
            loads=loads,
            off=self._off,
            ended_saves=self._saver.take_ended(),
            unsaved=self._saver.take_unsaved(),
            weights_step=self.weights.changed_after,
        )

    def drop_saves(self) -> None:
        """Give up saves of a step that has not ended. After it has returned, nothing reads blocks that are not pinned."""
        self._saver.drop()

    def drain(self, timeout_s: float) -> dict[int, int]:
        """Wait until every pinned save has ended, or time is over. Returns those that have."""
        self._saver.drain(timeout_s)
        return self._saver.take_ended()

    def close(self) -> None:
        """End loads, saves, threads and the Pool."""
        for fetch in self._fetches():
            fetch.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._saver.close()
        if self.pool is not None:
            self.pool.close()

    def _fetches(self) -> list[Fetch]:
        return [*self._sync, *(fetch for fetch, _ in self._running)]

    def _begin_load(self, fetch: Fetch) -> None:
        if (memory := self._memory) is not None:
            fetch.begin_load(memory)

    def _carry_out(self, fetch: Fetch) -> LoadOutcome:
        self._begin_load(fetch)
        return fetch.finish()

    def _wait(self, fetch: Fetch, layer: int) -> None:
        if not self._guard.call("waiting for a layer", False, fetch.wait_layer, layer):
            self._failed_step = self._plan.step

    def _settle_sync(self) -> None:
        """End the synchronous loads of this step, at the first call. Layers for which the model has waited by then are
        trusted."""
        if self._is_settled:
            return
        self._is_settled = True
        loads, self._sync = self._sync, []
        for fetch in loads:
            outcome = self._guard.call("ending a load", failed(fetch.order, "error"), fetch.finish)
            if outcome.is_complete and not fetch.has_waited_for(len(self._layers)):
                self._trusted = set()
                self._seen = set()
                self._guard.warn_once("the model does not wait for its layers, loads are waited for at once")
                outcome = failed(fetch.order, "not-waited-for")
            self._settle_load(fetch, outcome)
        self._trusted |= self._seen

    def _settle_load(self, fetch: Fetch, outcome: LoadOutcome) -> None:
        if not fetch.is_wanted:  # what it has brought before that may be of other weights, or gone with its memory
            outcome = failed(fetch.order, "cancelled")
        self._outcomes[fetch.request_id] = outcome
        self.tally.count("loads")
        self.tally.count("loaded_chunks", max(0, outcome.chunks - fetch.order.first_chunk))
        self.tally.count("load_seconds", outcome.seconds)
        if not outcome.is_complete:
            self.tally.count(f"short_loads_{outcome.reason}")
            if fetch.order.may_be_cut:
                self._bad_blocks |= fetch.blocks_without(outcome)
            else:
                self._failed_loads.add(fetch.request_id)
            if not fetch.order.is_async:
                self._failed_step = self._plan.step

    def _may_save(self) -> bool:
        return self._failed_step <= self._plan.acknowledged and self._is_of_these_weights()

    def _is_of_these_weights(self) -> bool:
        return self._plan.renewed >= self.weights.changed_after
