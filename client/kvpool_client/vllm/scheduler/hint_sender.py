"""Hint sender: sends retention requests and announcements to the daemon without waiting for it.

    request arrives ──► its hints ──► outcomes, which come back with the request's output
            │ not asked for when a step was planned ──► announced, and again while it waits
            └─ ended ──► its demotions

At most QUEUE_MAX calls wait for the queue's thread. Calls that do not fit are counted and dropped: nothing depends on them.
Invariant: the answer of each call is set, or cancelled, even if the daemon fails. The scheduler's thread, but for the queue's.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from kvpool.clock import Clock, Deadline
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.hint_envelope import ACCEPTED, CLIPPED, REJECTED, Outcome
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.scheduler.background_queue import BackgroundQueue
from kvpool_client.vllm.scheduler.request_hints import BESIDE, HintReply, Outcomes, RequestHints
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.statistics import Tally

QUEUE_MAX = 256
# The first so many waiting requests are announced: later ones have time.
ANNOUNCED_MAX = 32
# Half of the default time to live of an announcement.
ANNOUNCED_S = 15.0


class HintSender:
    """See the module. `counts`: what the other thread has counted since the last `move_counts`."""

    def __init__(self, pool: Pool, geometry: Geometry, *, tally: Tally, guard: FailureGuard, clock: Clock) -> None:
        self._pool = pool
        self._geometry = geometry
        self._tally = tally
        self._guard = guard
        self._clock = clock
        self._queue = BackgroundQueue("kvpool-hints", "sending hints", QUEUE_MAX, guard)
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}  # guarded by _lock, but for whether there are any

    def __repr__(self) -> str:
        return f"<HintSender {self._queue!r}>"

    def send_hints(self, entry: Tracked) -> None:
        """Send the hints of a request that has arrived: about chunks that are stored, or are to be promoted."""
        request_hints = entry.hints
        if not request_hints:
            return
        answer: Future[Outcomes] = Future()
        entry.hint_reply = HintReply(request_hints, answer)
        self._send(lambda: self._carry_out(request_hints, entry.keys, answer), answer)

    def announce(self, waiting: Iterable[Tracked]) -> None:
        """Announce the chunks of these requests, at most ANNOUNCED_MAX, which wait in this order."""
        for entry in waiting:
            if len(entry.keys) and entry.announced.has_passed():
                entry.announced = Deadline(ANNOUNCED_S, self._clock)
                self._send(partial(self._announce, entry.keys, entry.request.num_tokens))

    def end_request(self, entry: Tracked, when_saved: Callable[[Callable[[], None]], None]) -> dict[str, object] | None:
        """End a request. Returns the answer to its hints. `when_saved` calls back when its saves have ended too."""
        if entry.hint_reply is None:
            return None
        demotions = entry.hints.at_the_end
        if demotions.actions:
            keys = entry.keys
            when_saved(lambda: self._send(lambda: self._count_outcomes(self._pool.hint(demotions, keys).outcomes)))
        return entry.hint_reply.to_params()

    def move_counts(self) -> None:
        """Move what was counted on the other thread to the tally."""
        with self._lock:
            counts, self.counts = self.counts, {}
        for name, amount in counts.items():
            self._tally.count(name, amount)

    def stop(self) -> None:
        """End the thread; calls that have not begun are dropped."""
        self._queue.stop()

    def _send(self, run: Callable[[], None], answer: Future[Outcomes] | None = None) -> None:
        def drop() -> None:
            self._count("dropped_hints", 1)
            if answer is not None:
                answer.cancel()

        self._queue.send(run, dropped=drop)

    def _carry_out(self, request_hints: RequestHints, keys: KeyChain, answer: Future[Outcomes]) -> None:
        outcomes: Outcomes = ()
        try:
            hints = request_hints.at_once
            if hints.actions:
                outcomes = self._pool.hint(hints, keys, prompt_tokens=request_hints.prompt_tokens).outcomes
            if request_hints.has_own:
                # After the hints, because fields beside an envelope override it.
                outcomes = (*outcomes, self._retain(request_hints, keys))
        finally:
            answer.set_result(outcomes)
        self._count_outcomes(outcomes)

    def _retain(self, request_hints: RequestHints, keys: KeyChain) -> Outcome:
        retention = request_hints.retention_of_all()
        result = self._pool.retain(
            keys,
            retention.ranges,
            prompt_tokens=retention.prompt_tokens,
            decode_priority=retention.decode_priority,
            decode_duration_s=retention.decode_duration_s,
        )
        self._count("retained_chunks", result.accepted)
        if result.clipped:
            reason = f"{result.clipped} chunks stay at the default priority: its share is full"
            return Outcome("", BESIDE, CLIPPED, reason)
        absent = f"{result.absent} chunks are not stored yet" if result.absent else ""
        return Outcome("", BESIDE, ACCEPTED, absent)

    def _announce(self, keys: KeyChain, tokens: int) -> None:
        usable = min(len(keys), -(-self._geometry.usable_tokens(tokens) // keys.chunk_tokens))
        self._count("announced_chunks", self._pool.announce(keys, usable).announced)

    def _count_outcomes(self, outcomes: Outcomes) -> None:
        for outcome in outcomes:
            self._count(f"hints_{outcome.status}", 1)
            if outcome.status == REJECTED:
                what = outcome.action_type or "envelope"
                self._guard.warn_once("a hint of a request was rejected", f"{what}: {outcome.reason}")

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + amount
