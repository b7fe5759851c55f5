"""Tier jobs: what vLLM's scheduler asks a tier, answered without waiting and without raising.

    lookup ──► probe of shared memory: hit or miss, never "ask again"
    submit_load, submit_store ──► a line of its own, at most `queue_jobs` open in each ──► finished, once
    request ends ──► its chunks count as used, the beginning of the prompt last

vLLM reports nothing of what its region serves: so every request has all of its chunks offered (REQUEST_LEVEL), and those that
are there already count as used. A key that could not be loaded is a miss for its request from then on, else vLLM would ask for
ever. After a reset of vLLM's cache its weights may be others: a new weight epoch begins, in which nothing older is found, and
what requests of the old one computed is not stored. Where they change without a reset there is no epoch until the next one:
vLLM itself goes on with KV of the old weights, and nothing of that may be stored.

Invariants: every job that was submitted is finished once; nothing of a job touches the region when it is. The scheduler's
thread, but for the lines' own and the one that reads weights, which connects when it has read them. Lock: `_connecting`.
"""

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvpool.clock import NS_PER_S, Deadline, MonotonicClock
from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.flushing import flush_model
from kvpool_client.engines.job_line import JobLine
from kvpool_client.engines.weights import READING
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.vllm.identity.weight_epoch import FIRST_EPOCH, new_epoch
from kvpool_client.vllm.statistics import Tally
from kvpool_client.vllm.support import code_of
from kvpool_client.vllm.tier.identity import Engine, Identity, identify
from kvpool_client.vllm.tier.requests import RequestState, in_prompt_order, state_of
from kvpool_client.vllm.tier.row_store import Addresses, RowStore, name_of, names_of
from kvpool_client.vllm.tier.settings import Settings
from kvpool_client.vllm.tier.weight_watch import WeightWatch

LOG = logging.getLogger(__name__)
_LOADED = "complete"
# Another save that is just writing a chunk stores it.
_STORED = ("saved_chunks", "present_chunks", "declined_chunks_pending")
# Between two attempts to connect where a thread or a descriptor was lacking (guess).
RETRY_S = 1.0
_UNTIL_RESET = "nothing is loaded or stored until reset_prefix_cache(reset_connector=True)"
# vLLM's key ends with the number of its group.
GROUP_BYTES = 4
Counts = Counter[str]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended: whether as a whole, else which keys were loaded; what was counted, and how long it ran. `job_id`:
    None for what vLLM has not asked for."""

    job_id: int | None
    is_whole: bool
    good: tuple[bytes, ...] = ()
    counts: Counts = field(default_factory=Counter)
    seconds: float = 0.0


class TierJobs:
    """See the module."""

    def __init__(self, settings: Settings, spec: Any, view: memoryview, engine: Engine) -> None:
        """An engine that is not served runs without a pool: everything is a miss, and the reason is logged."""
        self._settings = settings
        self._guard = FailureGuard(LOG)
        self._tally = Tally()
        connect = partial(self._guard.call, "connect", None, self._connect)
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), LOG, when_read=connect)
        region = np.asarray(view)  # not kept: vLLM unmaps the region when the tier has shut down
        self._row_count, self._row_bytes, self._base = len(region), region.strides[0], region.ctypes.data
        blocks, groups = int(spec.config.cache.blocks_per_chunk), spec.config.groups
        self._group_tokens = {
            int(group.group_id).to_bytes(GROUP_BYTES, "big"): int(group.tokens_per_block) * blocks for group in groups
        }
        self._epoch: bytes | None = FIRST_EPOCH  # None: vLLM has KV of other weights than those that it has now
        self.weights = WeightWatch(
            engine.core, partial(self._guard.call, "note_new_weights", None, self._note_new_weights)
        )
        self._identity: Identity | None = None
        self._refusal = ""
        self._connecting = (
            threading.Lock()
        )  # held while connecting: by who constructs, or by the thread that has read weights
        self._is_closed = False
        self._retry = Deadline(RETRY_S)  # the scheduler's thread's
        self._rows: RowStore | None = None  # made under _connecting
        self._finished: deque[Finished] = deque()  # the lines add, the scheduler's thread takes
        self._loads = JobLine("kvpool-tier-load", self._guard, jobs_max=settings.queue_jobs)
        self._stores = JobLine("kvpool-tier-store", self._guard, jobs_max=settings.queue_jobs)
        try:
            self._identity = identify(spec, self._row_bytes, engine, settings=settings, environment=os.environ)
            self._identity.revision.begin_reading(self._reader)
            self._connect()
        except ENGINE_FAILURES as error:
            self._refuse(error)

    def __repr__(self) -> str:
        return f"<TierJobs {self._rows or self._refusal or 'reading'}, {self._loads!r} {self._stores!r}>"

    @property
    def guard(self) -> FailureGuard:
        """Of this tier's calls."""
        return self._guard

    def begin_request(self, context: Any) -> bool:
        """A request has arrived. Returns whether all of its chunks are to be offered: those that are there count as used."""
        if self._rows is None:
            self._tally.count(f"refused_requests_{self._reason}")
            self._connect_later()
        elif self._epoch is None:
            self._tally.count("refused_requests_new_weights")
        state = state_of(context, self._epoch)
        for reason in state.rejected:
            self._guard.warn_once("a hint of a request was rejected", reason)
        self._tally.count("rejected_hints", len(state.rejected))
        context.set_state(state)
        return self._rows is not None and self._epoch is not None and state.may_save

    def has(self, key: bytes, context: Any) -> bool:
        """Whether a chunk can be loaded for a request. No request to the daemon."""
        rows, epoch = self._rows, self._epoch
        if rows is None or epoch is None:
            return False
        state = self._state_of(context)
        if not state.may_load or key in state.failed or state.epoch is not epoch:
            return False
        return rows.level_of(name_of(key, epoch)) > 0

    def submit_load(self, job: Any) -> None:
        """Have rows filled. The job is finished in any case."""
        job_id, keys = int(job.job_id), tuple(job.keys)
        state = self._state_of(job.req_context)
        self.weights.has_kv = True  # in vLLM's region, before any step: later requests get it from there
        run = self._guard.call("submit_load", None, self._loading, state, keys, job.chunk_ids)

        def end(states: Sequence[str], seconds: float) -> None:
            good = [key for key, found in zip(keys, states, strict=True) if found == _LOADED]
            counts = Counter(f"failed_chunks_{found}" for found in states if found != _LOADED)
            counts["loaded_chunks"] = len(good)
            # Before the job is reported: the request's next question for such a key has to be a miss.
            state.failed.update(set(keys).difference(good))
            self._finished.append(Finished(job_id, len(good) == len(keys), tuple(good), counts, seconds))

        self._submit(self._loads, "load", run, without=lambda reason: [reason] * len(keys), end=end)

    def submit_store(self, job: Any) -> None:
        """Have rows stored. The job is finished in any case."""
        # The rows of a set are in the order in which it is iterated.
        job_id, keys = int(job.job_id), tuple(job.keys)
        run = self._guard.call("submit_store", None, self._storing, job.req_context, keys, job.chunk_ids)

        def end(counts: Counts, seconds: float) -> None:
            stored = sum(counts.get(name, 0) for name in _STORED)
            self._finished.append(Finished(job_id, stored == len(keys), (), counts, seconds))

        self._submit(
            self._stores,
            "store",
            run,
            without=lambda reason: Counter({f"declined_chunks_{reason}": len(keys)}),
            end=end,
        )

    def end_request(self, context: Any) -> None:
        """A request has ended, and nothing more is offered of it: where it was stored in several jobs, its beginning counts
        as used last now, as it would after one."""
        state, rows, epoch = context.get_state(RequestState), self._rows, self._epoch
        if state is None or rows is None or epoch is None or state.jobs < 2 or state.epoch is not epoch:
            return
        stored = dict(state.stored)
        state.stored.clear()

        def use_again() -> Counts:
            keys = tuple(stored)
            order = in_prompt_order(keys, [stored[key] for key in keys])
            return Counter(used_chunks=rows.use_again(names_of([keys[at] for at in order], epoch)))

        self._stores.submit("use", use_again, self._note)

    def take_finished(self) -> list[Finished]:
        """The jobs that have ended since the last call."""
        taken = []
        while self._finished:
            one = self._finished.popleft()
            for name, amount in one.counts.items():
                self._tally.count(name, amount)
            if one.job_id is not None:
                taken.append(one)
        return taken

    def drain(self) -> None:
        """End every job, and begin an epoch: a reset of vLLM's cache makes stale what is there. Waits about `timeout_s`.

        vLLM asks for it even where its own cache could not be emptied, as requests have blocks of it: after a change of weights
        new requests get those too, so nothing is loaded or stored until a reset that empties it.
        """
        self.weights.note_reset()
        if self._epoch is not None or not self.weights.has_kv:
            self._epoch = new_epoch()
        else:
            LOG.warning("kvpool: this reset has left KV of the weights before in vLLM; %s", _UNTIL_RESET)
        deadline = Deadline(self._settings.timeout_s)
        rows = self._rows
        late = partial(rows.give_up, is_over=False) if rows is not None else None
        try:
            self._loads.drain(deadline.remaining_s(), late)
            self._stores.drain(deadline.remaining_s(), late)
        finally:
            if rows is not None:
                rows.give_up(is_over=True)
        if self._settings.reset == "node" and rows is not None:
            failure = "the jobs under way have taken all of timeout_s"
            if not deadline.has_passed():
                failure = flush_model(self._settings.socket, rows.model, deadline.remaining_s(), is_bounded=True)
            if failure:
                self._guard.miss("flush", failure)
            self._tally.count("failed_flushes" if failure else "flushes")

    def take_counts(self) -> dict[str, int | float] | None:
        """What was counted since the last call; None for nothing."""
        counts = self._tally.take_counts() if self._tally.has_news else None
        return None if counts is None else counts.data

    def close(self) -> None:
        """End every job, the threads and the connection. Idempotent."""
        self._is_closed = True
        self._reader.stop()
        if self._rows is not None:
            self._rows.give_up(is_over=False)
        self._loads.close()
        self._stores.close()
        with self._connecting:
            if self._rows is not None:
                self._rows.close()

    @property
    def _reason(self) -> str:
        """Why there is no pool."""
        return self._refusal or READING.partition(":")[0]

    def _note_new_weights(self, call: str, has_old_kv: bool) -> None:
        """A call may have changed the weights in place. Where vLLM has KV of the old ones, it gives it to new requests too."""
        if not has_old_kv:
            if (
                self._epoch == FIRST_EPOCH
            ):  # that of the files; a later one is of whatever weights come before the first step
                self._epoch = new_epoch()
                LOG.warning("kvpool: %s may have changed the weights: chunks are this start's alone", call)
        elif self._epoch is not None:
            self._epoch = None
            LOG.warning("kvpool: %s may have changed the weights, and vLLM has KV from before; %s", call, _UNTIL_RESET)

    def _refuse(self, error: Exception) -> None:
        self._refusal = code_of(error)
        self._guard.warn_once("the engine runs without a pool", str(error))

    def _connect(self) -> None:
        """Have rows, once the model has a name; not twice, not where they are refused, and not after the end. Weights that are
        still being read call it again, on the reader's thread: a daemon that hangs takes its time there."""
        with self._connecting:
            if self._identity is None or self._rows is not None or self._refusal or self._is_closed:
                return
            try:
                revision = self._identity.revision.find()
                if revision is not None:
                    name, layout = self._identity.name, self._identity.layout
                    self._rows = RowStore(self._settings, self._guard, model=name, revision=revision, layout=layout)
            except (InvalidArgument, LayoutMismatch) as error:
                self._refuse(error)
            except ENGINE_FAILURES as error:  # no thread or descriptor is left: a later request tries again
                self._guard.miss("connect", error)

    def _connect_later(self) -> None:
        """Try again what has failed for want of a thread or a descriptor, on a line's thread."""
        if self._identity is not None and not self._refusal and self._retry.has_passed():
            self._retry = Deadline(RETRY_S)
            self._stores.submit("connect", self._connect, lambda _: None)

    def _state_of(self, context: Any) -> RequestState:
        """That of a request; a new one where vLLM has not shown it before."""
        state = context.get_state(RequestState)
        if state is None:
            state = state_of(context, self._epoch)
            context.set_state(state)
        assert isinstance(state, RequestState)
        return state

    def _addresses_of(self, chunk_ids: Any, count: int) -> Addresses:
        """Where the rows are. Raises InvalidArgument."""
        rows = np.array(chunk_ids, np.int64).reshape(-1)
        if len(rows) != count or (count and not (rows.min() >= 0 and rows.max() < self._row_count)):
            raise InvalidArgument(
                f"{len(rows)} rows are named for {count} keys, expected one of {self._row_count} for each"
            )
        return rows * self._row_bytes + self._base

    def _submit(
        self,
        line: JobLine,
        call: str,
        run: Callable[[], Result] | None,
        *,
        without: Callable[[str], Result],
        end: Callable[[Result, float], None],
    ) -> None:
        """Hand a job to its line. `end` has its result, or `without` its reason where it has not run, or has failed."""
        if run is None:
            end(without(self._reason if self._rows is None else "refused"), 0.0)
            return

        def timed() -> tuple[Result, float]:
            began_ns = MonotonicClock.now_ns()
            result = run()
            return result, (MonotonicClock.now_ns() - began_ns) / NS_PER_S

        line.submit(call, timed, lambda done: end(*(done if done is not None else (without("withdrawn"), 0.0))))

    def _note(self, counts: Counts | None) -> None:
        """Have this counted by the scheduler's thread."""
        self._finished.append(Finished(None, True, counts=counts or Counter()))

    def _loading(self, state: RequestState, keys: Sequence[bytes], chunk_ids: Any) -> Callable[[], list[str]] | None:
        """What loads these; None where nothing can."""
        rows, epoch = self._rows, self._epoch
        if rows is None or epoch is None or state.epoch is not epoch:
            return None
        addresses = self._addresses_of(chunk_ids, len(keys))
        return lambda: rows.load(names_of(keys, epoch), addresses)

    def _storing(self, context: Any, keys: Sequence[bytes], chunk_ids: Any) -> Callable[[], Counts] | None:
        """What stores these; None where nothing can."""
        rows, epoch, state = self._rows, self._epoch, self._state_of(context)
        if rows is None or epoch is None or not state.may_save or state.epoch is not epoch:
            return None
        addresses = self._addresses_of(chunk_ids, len(keys))
        ends = [context.get_offload_key_position(key) or 0 for key in keys]
        state.stored.update(zip(keys, ends, strict=True))
        state.jobs += 1
        priority = self._settings.priority

        def store() -> Counts:
            order = in_prompt_order(keys, ends)
            retention = [state.retention_of(ends[at], self._tokens_of(keys[at]), priority) for at in order]
            results = rows.save(names_of([keys[at] for at in order], epoch), addresses[order], retention)
            counts: Counts = Counter()
            for result in results:
                counts.update(saved_chunks=result.stored, present_chunks=result.present, clipped_chunks=result.clipped)
                counts.update({f"declined_chunks_{reason}": count for reason, count in result.reasons.items()})
            counts["declined_chunks_late"] = len(keys) - sum(len(result.codes) for result in results)
            return +counts

        return store

    def _tokens_of(self, key: bytes) -> int:
        """The tokens of a chunk of a key's group."""
        return self._group_tokens.get(key[-GROUP_BYTES:], 1)
