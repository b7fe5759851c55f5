"""Asking the daemon without waiting for it: a lease and its tickets, fetched on a thread of their own.

    asked ──granted in time──► Promise ──► its tickets travel to the workers
      └──late, refused, away──► nothing; what is granted after all is given back by itself

A scheduler decides thousands of times a second and must not hang on a daemon that does. One thread asks, in order, for all
requests; at most QUESTIONS_MAX wait. Invariant: every lease that was acquired is released here; tickets that nobody claims
end by their time to live.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from kvpool_client.border import Border
from kvpool_client.pool import Pool
from kvpool_client.results import Hit

QUESTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Promise:
    """Leading chunks that can be loaded with `tickets`, one for each replica. `tiers`: the level of each chunk."""

    chunks: int
    tickets: tuple[bytes, ...]
    tiers: bytes


NOTHING = Promise(0, (), b"")
Answer = Future[Promise]


class Asker:
    """Fetches promises from a scheduler's Pool."""

    def __init__(self, pool: Pool, replicas: int, border: Border) -> None:
        self._pool = pool
        self._replicas = replicas
        self._border = border
        self._changed = threading.Condition()
        self._questions: deque[tuple[Hit, Answer]] = deque()  # guarded by _changed
        self._is_stopping = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name="kvpool-ask", daemon=True)
        self._thread.start()

    def ask(self, hit: Hit) -> Answer:
        """Begin to fetch; a full queue or an ended asker answers NOTHING at once."""
        answer: Answer = Future()
        with self._changed:
            is_refused = self._is_stopping or len(self._questions) >= QUESTIONS_MAX
            if not is_refused:
                self._questions.append((hit, answer))
                self._changed.notify()
        if is_refused:
            answer.set_result(NOTHING)
        return answer

    def stop(self) -> None:
        """End the thread; questions not asked yet are answered with NOTHING."""
        with self._changed:
            self._is_stopping = True
            dropped = list(self._questions)
            self._questions.clear()
            self._changed.notify()
        for _, answer in dropped:
            answer.set_result(NOTHING)
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or bool(self._questions))
                if self._is_stopping:
                    return
                hit, answer = self._questions.popleft()
            self._border.call("asking the daemon", None, lambda hit=hit, answer=answer: self._fetch(hit, answer))  # type: ignore[misc]  # bound now
            if not answer.done():
                answer.set_result(NOTHING)

    def _fetch(self, hit: Hit, answer: Answer) -> None:
        with self._pool.acquire(hit) as lease:
            tickets = tuple(lease.ticket() for _ in range(self._replicas)) if lease.chunks else ()
            is_whole = bool(tickets) and all(tickets)
            answer.set_result(Promise(lease.chunks, tickets, lease.tiers.tobytes()) if is_whole else NOTHING)
