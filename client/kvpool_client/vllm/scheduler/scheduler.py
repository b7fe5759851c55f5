"""Scheduler's half of the vLLM connector: looks prompts up, decides which hits to load, plans the workers' loads and saves.

It moves no bytes and has no KV. A lookup reads shared memory; what turns hits into promises goes out for all requests of a step
together, and nobody waits for the answer longer than `offers` says. With several shards a prefix counts
only as far as every shard has it. Invariant: every hit that was reported to vLLM is a load in the next plan, even if it was
lost since. The scheduler's thread.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from kvpool.clock import Clock, Deadline, MonotonicClock
from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.load_cost import RateEstimator
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.pool import Pool
from kvpool_client.vllm.event_feed import EventFeed
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.identity.identity import UNNAMED_ADAPTER, AdapterNames
from kvpool_client.vllm.identity.role import BOTH, Role
from kvpool_client.vllm.identity.weight_epoch import FIRST_EPOCH, new_epoch
from kvpool_client.vllm.plan import LoadOrder, SaveOrder, StepPlan, StepReport
from kvpool_client.vllm.ranks.placement import node_name
from kvpool_client.vllm.scheduler.forgetting import OwnPrefixes, watch_resets
from kvpool_client.vllm.scheduler.hint_sender import ANNOUNCED_MAX, HintSender
from kvpool_client.vllm.scheduler.hit_finder import HitFinder
from kvpool_client.vllm.scheduler.hits_under_way import HitsUnderWay
from kvpool_client.vllm.scheduler.load_plan import failing_order, load_order
from kvpool_client.vllm.scheduler.offers import Offers
from kvpool_client.vllm.scheduler.request_hints import NO_HINTS, has_hints, request_hints_of
from kvpool_client.vllm.scheduler.requests import Tracked, boundaries_of, is_looked_up, rehashes_sessions
from kvpool_client.vllm.scheduler.saves.pins import Drain, Pins, can_be_held
from kvpool_client.vllm.scheduler.saves.save_plan import SavePlanner, has_foreign_loads
from kvpool_client.vllm.scheduler.saves.sightings import SightingCounts
from kvpool_client.vllm.scheduler.step_times import StepTimes
from kvpool_client.vllm.scheduler.unverified_loads import UnverifiedLoad, UnverifiedLoads, blocks_from_the_first_bad
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.statistics import Tally, sources_of
from kvpool_client.vllm.surface import BlockPool, EngineBlocks, EngineOutput, EngineRequest, EngineStep
from kvpool_client.vllm.timed_calls import LOG


class SchedulerHalf:
    """See the module. `pool` is a scheduler's Pool, standing for all shards; `feed`: where the pool's events come from."""

    def __init__(
        self,
        pool: Pool,
        geometry: Geometry,
        settings: Settings,
        guard: FailureGuard,
        *,
        feed: EventFeed | None = None,
        role: Role = BOTH,
        clock: Clock | None = None,
    ) -> None:
        self.pool = pool
        self.tally = Tally()
        self._geometry = geometry
        self._settings = settings
        self._guard = guard
        self._role = role
        self._clock = clock or MonotonicClock()
        self._rates = RateEstimator()
        self._promise_line = pool.open_promise_line(geometry.ranks.tickets, geometry.ranks.claims)
        self._offers = Offers(self._promise_line, settings, rates=self._rates, tally=self.tally, clock=self._clock)
        self._hits = HitFinder(
            pool,
            geometry,
            settings=settings,
            rates=self._rates,
            offers=self._offers,
            tally=self.tally,
            clock=self._clock,
        )
        self._times = StepTimes(self._rates, self._clock)
        self._feed = feed
        self.has_feed = feed is not None  # whether there may be events to take
        self._hint_sender = HintSender(pool, geometry, tally=self.tally, guard=guard, clock=self._clock)
        self._is_rehashed = rehashes_sessions()
        self._requests: dict[str, Tracked] = {}
        self._waiting: dict[str, EngineRequest] = {}
        self._adapters = AdapterNames(WeightsReader(DigestMemory.of_user(os.environ), LOG))
        self._loads: list[LoadOrder] = []
        self._hits_under_way = HitsUnderWay(self.tally, geometry.chunk_tokens)
        self._cancelled: list[str] = []
        self._asked: dict[str, int] = {}
        self._epoch = FIRST_EPOCH
        self._renewed = -1  # the last step whose KV is not of it
        self._own_prefixes = OwnPrefixes()
        self._pins = Pins(geometry.ranks.count, self._clock, settings.timeout_s)
        self._sightings = SightingCounts(settings.save_after)
        self._planner = SavePlanner(geometry, self._pins, self._sightings)
        self._unverified_loads = UnverifiedLoads()
        self._evict: Callable[[set[int]], object] = lambda _blocks: None
        self._step = self._acknowledged = 0
        self._off = ""

    def __repr__(self) -> str:
        return f"<SchedulerHalf {len(self._requests)} requests, step {self._step}, {self.pool!r}>"

    def bind_blocks(self, pool: BlockPool, *, drain: Drain | None, is_stepped_while_idle: bool) -> None:
        """vLLM's blocks. `drain` ends saves of a worker in this process; `is_stepped_while_idle`: an idle engine steps.

        Where blocks cannot be held, or the end of saves cannot be reported, a step waits for its saves.
        """
        self._evict = pool.evict_blocks
        if not watch_resets(pool, self._before_reset, self._after_reset):
            self._guard.warn_once("vLLM's resets cannot be seen", "nothing is saved after a change of weights")
        if can_be_held(pool) and (is_stepped_while_idle or drain is not None):
            self._pins.hold_in(pool, None if is_stepped_while_idle else drain)
        else:
            self._guard.warn_once("vLLM's blocks cannot be held", "each step waits until its chunks are saved")

    def arrived(self, request: EngineRequest) -> None:
        """A new request, which waits for its lookup. Of many at once most are looked at later, unless they bring hints."""
        if self._settings.announce and self._role.may_load and is_looked_up(request):
            self._waiting[request.request_id] = request
        if self._offers.has_time_for_arrivals or has_hints(request):
            self._offers.begin_work()
            try:
                self._track(request)
            finally:
                self._offers.end_work()

    def matched_tokens(self, request: EngineRequest, held_tokens: int) -> tuple[int | None, bool]:
        """Tokens after `held_tokens` that can be loaded, and whether between steps; None: ask again later."""
        request_id = request.request_id
        self._waiting.pop(request_id, None)
        self._asked[request_id] = held_tokens
        entry = self._requests.get(request_id)
        if self._offers.has_done_all(entry, held_tokens):
            return (0, False) if self._is_never_loaded(request, entry) else (None, False)
        self._offers.begin_work()
        try:
            return self._match(request, held_tokens)
        finally:
            self._offers.end_work()

    def _is_never_loaded(self, request: EngineRequest, entry: Tracked | None) -> bool:
        """Whether a request that has not been asked about never will be."""
        if entry is not None and entry.answer is not None:
            return False
        if self._off or not (self._role.may_load and is_looked_up(request)):
            return True
        return entry is not None and (entry.has_given_up or entry.hints.load == "none")

    def _match(self, request: EngineRequest, held_tokens: int) -> tuple[int | None, bool]:
        nothing, later = (0, False), (None, False)
        if (known := self._requests.get(request.request_id)) is not None:
            known.is_offered = False
            if self._offers.is_pending(known, held_tokens):
                return later
        if not self._offers.has_time and (known is None or known.answer is None):
            return nothing if self._offers.are_declined else later  # no other connector's offer waits for this one
        if self._unverified_loads.has_any_of(request.block_hashes, held_tokens // self._geometry.hash_tokens):
            self.tally.count("waits_for_a_shared_load")
            return later
        if self._off or not (self._role.may_load and is_looked_up(request)):
            return nothing
        entry = self._track(request)
        if entry.has_come_back(request):
            return nothing
        usable = self._geometry.usable_tokens(request.num_tokens)
        if entry.has_given_up or entry.hints.load == "none" or usable <= held_tokens:
            return nothing
        if not self._offers.is_known(entry, held_tokens):
            if not self._offers.has_time:
                return nothing if self._offers.are_declined else later
            if self._hits.goes_on_waiting(entry, held_tokens):
                return later
            hit = self._hits.find(entry, held_tokens, usable)
            if hit is None:
                return later
            if not self._offers.ask_promise(entry, hit, held_tokens):
                return nothing
            if self._offers.is_pending(entry, held_tokens):
                return later
        tokens = min(self._offers.promise(entry).chunks * self._geometry.chunk_tokens, usable) - held_tokens
        return (tokens, self._settings.is_async) if entry.offers(tokens) else nothing

    def allocated(self, request: EngineRequest, blocks: EngineBlocks, tokens: int) -> None:
        """vLLM has allocated blocks, and counts on `tokens` from the pool (0: none, or the second call of a load)."""
        self._offers.begin_work()
        is_done = self._guard.call("allocation", False, lambda: self._note_allocation(request, blocks, tokens))
        self._offers.end_work()
        if not is_done and tokens > 0:
            # vLLM waits for this load: the worker has to report that none of the blocks came.
            self._loads.append(
                failing_order(request.request_id, blocks, geometry=self._geometry, is_async=self._settings.is_async)
            )

    def _note_allocation(self, request: EngineRequest, blocks: EngineBlocks, tokens: int) -> bool:
        entry = self._track(request)
        entry.note_allocation(request)
        self._own_prefixes.note_used()
        entry.hit_sources = {}
        declined, entry.declined = entry.declined, {}
        for name, count in declined.items():
            self.tally.count(name, count)
        kept = self._offers.chunks_kept(entry)
        if kept is not None:
            self._planner.plan_from(entry, kept)  # what is computed now
        if tokens <= 0:
            if not entry.is_loading:
                self._offers.note_declined(entry)
            return True
        promise = self._offers.promise(entry)
        self._offers.note_taken(entry)
        entry.chunks_planned = max(entry.chunks_planned, promise.chunks)  # on this node once they are loaded
        entry.is_loading = self._settings.is_async
        first, size = entry.held_tokens, self._geometry.chunk_tokens
        order = load_order(
            request.request_id,
            blocks,
            promise,
            geometry=self._geometry,
            tokens=range(first, first + tokens),
            is_async=self._settings.is_async,
        )
        self._loads.append(order)
        if not order.is_async:
            place = first // self._geometry.hash_tokens
            self._unverified_loads.add_load(
                UnverifiedLoad(self._step + 1, place, bytes(request.block_hashes[place]), entry)
            )
        self._hits_under_way.begin_load(request.request_id, range(first, first + tokens))
        entry.hit_sources = sources_of(order.tiers, tokens, first % size, size)
        return True

    def hit_sources(self, request: EngineRequest) -> dict[str, int]:
        """Tokens of the last load by the name of the tier that they come from."""
        entry = self._requests.get(request.request_id)
        return entry.hit_sources if entry is not None else {}

    def plan(self, step: EngineStep) -> StepPlan:
        """The plan of this step for the workers."""
        self._step = number = self._step + 1
        if self._unverified_loads.loads:
            self._unverified_loads.begin_step(number)
        is_idle = not step.num_scheduled_tokens
        self._offers.begin_step(is_idle=is_idle and not self._times.is_computing)
        loads: tuple[LoadOrder, ...] = ()
        cancelled: tuple[str, ...] = ()
        if self._loads:
            loads, self._loads = tuple(self._loads), []
        if self._cancelled:
            cancelled, self._cancelled = tuple(self._cancelled), []
        has_loads = bool(loads) and any(not order.is_async for order in loads)
        self._times.begin_step(number, step, self._requests, has_loads=has_loads)
        if self._waiting and not self._off:
            self._guard.call("announcing", None, lambda: self._hint_sender.announce(self._first_waiting()))
        if self._hint_sender.counts:
            self._hint_sender.move_counts()
        if self._asked:
            asked, self._asked = self._asked, {}
            if has_foreign_loads(step, asked, {order.request_id for order in loads}):
                self.tally.count("waits_for_another_connectors_load")
                self._planner.hold(number)
        saves: tuple[SaveOrder, ...] | None = ()
        if not self._off:
            pinned_before = self._pins.last
            saves = self._guard.call("planning saves", None, self._planner.plan, number, step, self._requests, loads)
            if saves is None:
                self._pins.release_after(pinned_before)
                self._planner.forget_tables(self._requests)
        board = self._pins.board_path
        return StepPlan(
            number,
            self._acknowledged,
            loads,
            saves or (),
            cancelled,
            is_idle,
            node=node_name(),
            board=board,
            renewed=self._renewed,
        )

    def _first_waiting(self) -> Iterator[Tracked]:
        """The requests that vLLM has not asked about yet, as far as there is time to look at them."""
        for request in list(islice(self._waiting.values(), ANNOUNCED_MAX)):
            entry = self._requests.get(request.request_id)
            if entry is None:
                if not self._offers.has_time_for_arrivals:
                    return
                self._offers.begin_work()
                entry = self._track(request)
                self._offers.end_work()
            yield entry

    def ended(self, output: EngineOutput) -> None:
        """Process the report of a step that has ended."""
        received = output.finished_recving or ()
        for request_id in received:
            if request_id in self._requests:
                self._requests[request_id].is_loading = False
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        self._times.end_step(report.step)
        has_failed = report.failed_step > self._acknowledged or bool(output.invalid_block_ids)
        dropped = self._planner.confirm(report.step, self._requests, has_failed=has_failed)
        if dropped:
            self.tally.count("dropped_saves", dropped)
        if report.ended_saves:
            self._pins.count_ended(report.ended_saves)
        if report.unsaved:
            self._planner.plan_again(report.unsaved, self._requests, Deadline(self._settings.timeout_s, self._clock))
        settled = self._unverified_loads.settle_step(report.step) if self._unverified_loads.loads else []
        if output.invalid_block_ids:
            bad = set(output.invalid_block_ids)
            entries = [*self._requests.values(), *(load.entry for load in settled)]
            self._evict(blocks_from_the_first_bad(entries, bad))
            self._planner.plan_behind_bad_blocks(bad, self._requests)
        if report.off and not self._off:
            self._off = report.off
            self.tally.count("dropped_saves", self._planner.give_up())
            self._guard.warn_once("the workers have no pool", report.off)
        for request_id, outcome in report.loads.items():
            self._hits_under_way.note_outcome(request_id, outcome)
            size = self._geometry.chunk_bytes
            if outcome.is_complete or outcome.reason == "timeout":
                # A load that came too late still measures how slow it was.
                self._rates.add_load(outcome.tiers, size, outcome.cost_of_all_s)
            if outcome.is_complete:
                continue
            self.tally.count(f"failed_loads_{outcome.reason}")
            if outcome.reason != "cancelled":  # its request has ended
                self._guard.warn_once(
                    f"a load failed: {outcome.reason}", f"{outcome.chunks} of {outcome.wanted} chunks came"
                )
            entry = self._requests.get(request_id)
            if entry is not None:
                # A second attempt would fail again: this request computes from here on.
                entry.has_given_up = True
                self._planner.plan_from(entry, outcome.chunks)
        if received or report.loads:
            for request_id in received if self._settings.is_async else report.loads:
                self._hits_under_way.end_load(request_id)
        if report.failed_step > self._acknowledged:
            self._acknowledged = report.failed_step
        if report.weights_step > self._renewed:
            remedy = "call reset_prefix_cache(reset_connector=True) when they are changed"
            self._guard.warn_once("the weights were changed in place, and requests have run since", remedy)
            self.renew(report.weights_step)

    def finished(self, request: EngineRequest) -> dict[str, object] | None:
        """The request has ended or was aborted. Returns the answer to its hints, if it had any."""
        self._waiting.pop(request.request_id, None)
        entry = self._requests.pop(request.request_id, None)
        self._planner.forget(request.request_id)
        if entry is None:
            return None
        if entry.is_loading:
            self._cancelled.append(request.request_id)
        self._offers.give_back(entry)
        for name, chunks in entry.unplanned.items():
            self.tally.count(name, chunks)
        if not self._requests and self._pins.must_end_with_requests:
            self.tally.count("dropped_saves", self._planner.give_up())
            self._pins.idle()
        return self._hint_sender.end_request(entry, self._pins.when_ended)

    def has_saves(self) -> bool:
        """Whether the engine must step on, until saves have been reported as ended and every question has its answer."""
        return bool(self._pins) or self._promise_line.is_busy

    def may_soon_free_blocks(self) -> bool:
        """Whether waiting for saves to end is better than preempting a request."""
        return self._pins.may_soon_end()

    def take_events(self) -> list[object]:
        """New events of the pool, in the engine's own form; never waits."""
        return self._feed.take_batch() if self._feed is not None else []

    def renew(self, changed_after: int | None = None) -> bool:
        """Begin a new weight epoch: no chunk of the old weights is found, and no running load counts for the new ones.

        Requests that had no blocks yet are looked up again, the others are neither loaded nor saved: they may have KV of the
        old ones. So may vLLM's own blocks until it has reset its prefix cache. `changed_after`: the step after which the
        weights were changed; None: the last one. Returns True.
        """
        # A reported change counts from where it happened: there may be another one between it and this step.
        self._epoch, self._renewed = new_epoch(), self._step if changed_after is None else changed_after
        self._own_prefixes.renew(changed_after)
        if self._own_prefixes.are_old:
            remedy = "nothing is saved until reset_prefix_cache succeeds: call it again when no request runs"
            self._guard.warn_once("vLLM has prefixes of earlier weights", remedy)
        self._loads = [replace(order, tickets=()) for order in self._loads]
        for request_id, entry in list(self._requests.items()):
            self._offers.give_back(entry)
            if not entry.has_had_blocks:
                del self._requests[request_id]
                self._planner.forget(request_id)
                continue
            entry.is_stale = entry.has_given_up = True
            if entry.is_loading:
                self._cancelled.append(request_id)
        return True

    def close(self) -> None:
        """End the threads and the Pool."""
        if self._feed is not None:
            self._feed.stop()
        self._hint_sender.stop()
        self._promise_line.close()
        self._pins.close()
        self._adapters.stop()
        self.pool.close()

    def _before_reset(self) -> None:
        self._guard.call("a reset of prefixes", None, self._free_for_reset)

    def _free_for_reset(self) -> None:
        if self._pins and self._pins.are_alone():
            self.tally.count("dropped_saves", self._planner.give_up())
            self._pins.free_for_reset()

    def _after_reset(self, is_done: bool) -> None:
        if not is_done:
            return
        self._own_prefixes.note_reset(self._step)
        if self._feed is not None:
            self._feed.republish()
        for entry in self._requests.values():
            entry.is_stale = entry.is_stale and entry.has_had_blocks

    def _track(self, request: EngineRequest) -> Tracked:
        entry = self._requests.get(request.request_id)
        is_new = entry is None
        if entry is None:
            salt = str(getattr(request, "cache_salt", None) or "").encode("utf-8", "surrogatepass")
            named = self._adapter_of(request)
            adapter = UNNAMED_ADAPTER if named is None else named
            entry = Tracked(
                request,
                partial(self.pool.keys_from_hashes, [], self._geometry.hash_tokens, salt=salt, adapter=adapter),
                salt=salt,
                adapter=adapter,
                chunk_hashes=self._geometry.chunk_tokens // self._geometry.hash_tokens,
                hints=self._guard.call("reading hints", NO_HINTS, lambda: request_hints_of(request)),
            )
            entry.epoch, entry.is_stale = self._epoch, self._own_prefixes.are_old
            self._requests[request.request_id] = entry
        entry.request = request
        if entry.has_new_input(is_rehashed=self._is_rehashed):
            size, prompt = self._geometry.chunk_tokens, request.num_prompt_tokens
            entry.hints = entry.hints if is_new else replace(entry.hints, prompt_tokens=prompt)
            may_save = self._role.may_save and entry.adapter != UNNAMED_ADAPTER
            entry.save_chunks = entry.hints.save_tokens(self._settings.save, prompt) // size if may_save else 0
            entry.boundaries |= boundaries_of(prompt, size)
            if prompt > (end := self.pool.chunks_max) * size:
                entry.boundaries.add(end)  # of the longest hit
        entry.extend_keys()
        if is_new:
            self._sightings.see(entry.take_unseen())
            self._hint_sender.send_hints(entry)
        return entry

    def _adapter_of(self, request: EngineRequest) -> str | None:
        """The adapter's name; None where it has none yet, or none any more."""
        try:
            return self._adapters.of(getattr(request, "lora_request", None))
        except LayoutMismatch as error:
            self._guard.warn_once("requests with an adapter are neither loaded nor saved", str(error))
            return None
