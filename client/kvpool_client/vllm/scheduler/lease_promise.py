"""Lease promises: a lease and its tickets, fetched from the daemon on a thread of their own, so that the scheduler never waits.

    asked ──granted in time──► LeasePromise ──► its tickets travel to the workers
      └──late, refused, away──► nothing              └──no longer needed──► its tickets are given back

A scheduler decides thousands of times a second and must never hang on the daemon. One thread asks, in order, for all requests;
at most QUESTIONS_MAX wait. Invariant: every lease that was acquired is released here; tickets that are neither claimed nor
given back end by their time to live.
"""

from concurrent.futures import Future
from dataclasses import dataclass

from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.pool import Pool
from kvpool_client.results import Hit
from kvpool_client.vllm.ranks.ranks import Ranks
from kvpool_client.vllm.scheduler.background_queue import BackgroundQueue

# Requests for promises, and tickets that are given back.
QUESTIONS_MAX = 128


@dataclass(frozen=True, slots=True)
class LeasePromise:
    """Leading chunks that can be loaded with `tickets` (see `Ranks`). `tiers`: the level of each chunk."""

    chunks: int
    tickets: tuple[bytes, ...]
    tiers: bytes


NOTHING = LeasePromise(0, (), b"")
Answer = Future[LeasePromise]


class LeasePromiseFetcher:
    """Fetches lease promises through a scheduler's Pool."""

    def __init__(self, pool: Pool, ranks: Ranks, guard: FailureGuard) -> None:
        self._pool = pool
        self._ranks = ranks
        self._queue = BackgroundQueue("kvpool-ask", "fetching leases", QUESTIONS_MAX, guard)

    def ask(self, hit: Hit) -> Answer:
        """Begin to fetch; with a full queue, or after `stop`, the answer is NOTHING at once."""
        answer: Answer = Future()
        self._queue.send(lambda: self._fetch(hit, answer), dropped=lambda: answer.set_result(NOTHING))
        return answer

    def give_back(self, answer: Answer) -> None:
        """Give the tickets of an unused answer back. With a full queue they end by their time to live."""
        self._queue.send(lambda: self._end_tickets(answer), dropped=lambda: None)

    def stop(self) -> None:
        """End the thread; questions not asked yet are answered with NOTHING."""
        self._queue.stop()

    def _fetch(self, hit: Hit, answer: Answer) -> None:
        promise = NOTHING
        try:
            with self._pool.acquire(hit) as lease:
                count, claims = self._ranks.tickets if lease.chunks else 0, self._ranks.claims
                tickets = tuple(lease.ticket(claims) for _ in range(count))
                if tickets and all(tickets):
                    promise = LeasePromise(lease.chunks, tickets, lease.tiers.tobytes())
        finally:
            answer.set_result(promise)

    def _end_tickets(self, answer: Answer) -> None:
        """Runs after the request itself, on its thread: the answer is complete."""
        is_there = answer.done() and not answer.cancelled()
        for ticket in answer.result(0).tickets if is_there else ():
            self._pool.claim(ticket)
