"""The worker's half: loads into and saves from this rank's blocks, as the plan of each step says.

Asynchronous loads run on threads of their own between steps; synchronous ones start before the forward pass, which waits
for one layer at a time. Saves are announced layer by layer while the forward pass runs, and published when it has ended:
when `end_forward` returns, no block is read any more. Invariants: every order is answered exactly once, with an outcome;
after a failed load nothing is saved until a plan acknowledges the failure, because what was computed since may rest on KV
that never came; what nobody waited for counts as failed.

The thread that runs the model, but for the load threads.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures

import numpy as np

from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import KVPoolError
from kvpool_client.border import Border
from kvpool_client.cache import Cache
from kvpool_client.pool import Pool
from kvpool_client.save import Save
from kvpool_client.vllm.fetch import Fetch, failed
from kvpool_client.vllm.geometry import Geometry, Tensor, block_views
from kvpool_client.vllm.plan import NO_PLAN, Keeping, LoadOutcome, SaveOrder, StepPlan, StepReport
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.statistics import Tally

NOTHING_SAID = Keeping((), 0)
# A step without tokens has nothing to do but to see whether loads have ended, and is followed by the next one at once. So it
# waits, instead of taking the interpreter from the threads that load; a request that arrives waits no longer than this.
IDLE_WAIT_S = 0.001


class WorkerHalf:
    """See the module. `connect` gives the Pool of this rank's shard, once the engine's tensors are known."""

    def __init__(
        self,
        connect: Callable[[], Pool],
        geometry: Geometry,
        settings: Settings,
        border: Border,
        *,
        rank: int,
        clock: Clock | None = None,
    ) -> None:
        self.tally = Tally()
        self.pool: Pool | None = None
        self._connect = connect
        self._geometry = geometry
        self._settings = settings
        self._border = border
        self._replica = rank % geometry.replicas
        self._clock = clock or MonotonicClock()
        self._cache: Cache | None = None
        self._off = "no KV caches were registered"
        self._layers = {name: number for number, name in enumerate(geometry.layer_names)}
        self._threads = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvpool-load")
        self._plan = NO_PLAN
        self._running: list[tuple[Fetch, Future[LoadOutcome]]] = []
        self._sync: list[Fetch] = []
        self._saves: list[Save] | None = None
        self._outcomes: dict[str, LoadOutcome] = {}
        self._bad_blocks: set[int] = set()
        self._failed_step = 0
        self._waits_at_once = False

    def __repr__(self) -> str:
        return f"<WorkerHalf step {self._plan.step}, {len(self._running)} loads, {self.pool!r}>"

    def register(self, tensors: Mapping[str, Tensor]) -> None:
        """The engine's KV. What does not fit leaves this rank without a pool, which the scheduler then hears of."""
        try:
            views = block_views(self._geometry, tensors)
            self.pool = self.pool or self._connect()
            self._cache = self.pool.register(views, block_tokens=self._geometry.block_tokens)
            self._off = ""
        except KVPoolError as error:
            self._off = str(error)
            self._border.complain("this worker has no pool", self._off)

    def begin(self, plan: StepPlan) -> None:
        """A step begins. Saves of a step that never came to its end are given up."""
        self.drop_saves()
        self._plan = plan
        for request_id in plan.cancelled:
            for fetch, _ in self._running:
                if fetch.request_id == request_id:
                    self._border.call("cancelling a load", None, fetch.cancel)

    def start_loads(self) -> None:
        """Begin the plan's loads: synchronous ones run when this returns, asynchronous ones are handed over."""
        for order in self._plan.loads:
            fetch = Fetch(order, replica=self._replica, clock=self._clock)
            if order.is_async:
                self._running.append((fetch, self._threads.submit(self._carry_out, fetch)))
                continue
            self._sync.append(fetch)
            self._border.call("starting a load", None, lambda fetch=fetch: self._begin(fetch))  # type: ignore[misc]  # bound now
            if self._waits_at_once:
                for layer in range(len(self._layers)):
                    fetch.wait_layer(layer)

    def wait_layer(self, name: str) -> None:
        """Before the forward pass reads a layer: until the synchronous loads have brought it, or have failed."""
        layer = self._layers.get(name)
        if layer is None:
            return
        for fetch in self._sync:
            if not self._border.call("waiting for a layer", False, lambda fetch=fetch: fetch.wait_layer(layer)):  # type: ignore[misc]  # bound now
                self._failed_step = self._plan.step

    def save_layer(self, name: str) -> None:
        """The forward pass has written a layer: its bytes may be read."""
        layer = self._layers.get(name)
        if layer is None or not self._plan.saves:
            return
        for save in self._open_saves():
            save.layer(layer)

    def end_forward(self) -> None:
        """The forward pass has ended: settle the synchronous loads, then publish the saves, or give all of them up."""
        for fetch in self._sync:
            outcome = self._border.call("ending a load", failed(fetch.order, "error"), fetch.finish)
            if outcome.is_complete and not fetch.has_waited_for(len(self._layers)):
                self._waits_at_once = True
                self._border.complain("the model does not wait for its layers, loads are waited for at once")
                outcome = failed(fetch.order, "not-waited-for")
            self._settle(fetch, outcome)
        self._sync = []
        if not self._may_save():
            self.drop_saves()
            return
        for save in self._open_saves():
            self._commit(save)
        self._saves = None

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous load has ended, well or not, since the last time."""
        if self._plan.is_idle and self._running:
            wait_for_futures([future for _, future in self._running], IDLE_WAIT_S, FIRST_COMPLETED)
        # Looked at once each: a load that ends meanwhile is for the next time.
        are_done = [future.done() for _, future in self._running]
        ended = [pair for pair, is_done in zip(self._running, are_done, strict=True) if is_done]
        self._running = [pair for pair, is_done in zip(self._running, are_done, strict=True) if not is_done]
        for fetch, future in ended:
            error = future.exception()
            if error is not None:
                self._border.complain(f"a load failed: {type(error).__name__}", str(error))
                fetch.release()
            self._settle(fetch, failed(fetch.order, "error") if error is not None else future.result())
        return {fetch.request_id for fetch, _ in ended}

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a load was to fill and did not, since the last time."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def report(self) -> StepReport:
        """What the scheduler's half has to know of this step."""
        loads, self._outcomes = self._outcomes, {}
        return StepReport(self._plan.step, self._failed_step, loads, self._off)

    def drop_saves(self) -> None:
        """Give up saves that are open. When it returns no block is read any more."""
        saves, self._saves = self._saves or [], None
        for save in saves:
            self._border.call("giving a save up", None, save.abort)
        if saves:
            self.tally.add("dropped_saves", len(saves))

    def close(self) -> None:
        """End loads, saves, threads and the Pool."""
        self.drop_saves()
        for fetch in [*self._sync, *(fetch for fetch, _ in self._running)]:
            fetch.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.pool is not None:
            self.pool.close()

    def _begin(self, fetch: Fetch) -> None:
        if self.pool is not None and self._cache is not None:
            fetch.begin(self.pool, self._cache)

    def _carry_out(self, fetch: Fetch) -> LoadOutcome:
        self._begin(fetch)
        return fetch.finish()

    def _settle(self, fetch: Fetch, outcome: LoadOutcome) -> None:
        self._outcomes[fetch.request_id] = outcome
        self.tally.add("loads")
        self.tally.add("loaded_chunks", max(0, outcome.chunks - fetch.order.first_chunk))
        self.tally.add("load_seconds", outcome.seconds)
        if not outcome.is_complete:
            self.tally.add(f"short_loads_{outcome.reason}")
            self._bad_blocks |= fetch.blocks_without(outcome)
            self._failed_step = self._plan.step

    def _may_save(self) -> bool:
        return self._failed_step <= self._plan.acknowledged

    def _open_saves(self) -> list[Save]:
        """The saves of this step, opened at the first layer that is ready."""
        if self._saves is None:
            self._saves = []
            is_writer = self._replica == 0 and self._may_save()
            for order in self._plan.saves if is_writer else ():
                save = self._border.call("opening a save", None, lambda order=order: self._open(order))  # type: ignore[misc]  # bound now
                if save is not None:
                    self._saves.append(save)
        return self._saves

    def _open(self, order: SaveOrder) -> Save | None:
        if self.pool is None or self._cache is None:
            return None
        size = self._geometry.chunk_tokens
        first, keeping = order.first_chunk, order.keeping or NOTHING_SAID
        keys = self.pool.keys_from_hashes(
            order.hashes[:first], size, salt=order.salt, adapter=order.adapter, adapter_name=order.lora_name or None
        )
        keys.append_hashes(order.hashes[first:], np.frombuffer(order.tokens, "<i4") if order.tokens else None)
        return self.pool.save(
            keys,
            self._cache,
            order.block_ids,
            first_chunk=first,
            retention=keeping.retention,
            prompt_tokens=keeping.prompt_tokens,
            decode_priority=keeping.decode_priority,
            decode_duration_s=keeping.decode_duration_s,
        )

    def _commit(self, save: Save) -> None:
        result = self._border.call("ending a save", None, save.commit)
        if result is None:
            self._border.call("giving a save up", None, save.abort)
            return
        self.tally.add("saved_chunks", result.stored)
        self.tally.add("present_chunks", result.present)
        self.tally.add("clipped_chunks", result.clipped)
        for reason, count in result.reasons.items():
            self.tally.add(f"declined_chunks_{reason}", count)
