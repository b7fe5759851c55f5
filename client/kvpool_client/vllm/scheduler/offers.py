"""Offers to vLLM: the daemon's promise for a request's prefix, and how long the scheduler waits for it.

A request for a promise is sent on the fetcher's thread. The scheduler itself waits a moment for the answers, at most
ANSWER_WAIT_S in each step for any number of requests; a request is held back half of `wait_s` for its answer. Invariant:
`Tracked.is_offered` is true only between an answer to vLLM above 0 and vLLM's next call about that request. The scheduler's
thread.
"""

from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as LateError

from kvpool.clock import NS_PER_S, Clock, Deadline
from kvpool_client.results import Hit
from kvpool_client.vllm.scheduler.lease_promise import NOTHING, LeasePromise, LeasePromiseFetcher
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.statistics import Tally

# How long all lookups of a step may block the scheduler itself; an answer usually takes a tenth of a millisecond.
ANSWER_WAIT_S = 0.005
# The same for one lookup where another connector may take the offer: requests would be held back without use.
ANSWER_WAIT_BEHIND_OTHERS_S = 0.001
# A promise older than this is fetched again: well below the shortest useful time to live of leases (guess).
PROMISE_AGE_MAX_S = 5.0


class Offers:
    """See the module. `are_declined`: another connector's offer was better the last time."""

    def __init__(self, fetcher: LeasePromiseFetcher, wait_s: float, tally: Tally, clock: Clock) -> None:
        self.are_declined = False
        self._fetcher = fetcher
        self._wait_s = wait_s
        self._tally = tally
        self._clock = clock
        self._left_s = ANSWER_WAIT_S

    def __repr__(self) -> str:
        return f"<Offers {'declined' if self.are_declined else 'taken'}, {self._left_s:.3f} s left in this step>"

    def begin_step(self) -> None:
        """The scheduler may wait for answers again."""
        self._left_s = ANSWER_WAIT_S

    def is_known(self, entry: Tracked, held_tokens: int) -> bool:
        """Whether a promise for what follows these tokens is pending or known, and not too old."""
        return entry.answer is not None and entry.held_tokens == held_tokens and not entry.answer_age.has_passed()

    def ask(self, entry: Tracked, hit: Hit, held_tokens: int) -> bool:
        """Fetch a promise for what the hit has after `held_tokens`; False where that is nothing."""
        if entry.answer is not None:
            self._fetcher.give_back(entry.answer)
        entry.held_tokens = held_tokens
        entry.asked_tokens = hit.tokens - held_tokens
        entry.answer = self._fetcher.ask(hit) if hit.tokens > held_tokens else None
        entry.answer_age = Deadline(PROMISE_AGE_MAX_S, self._clock)
        return entry.answer is not None

    def promise(self, entry: Tracked) -> LeasePromise | None:
        """The daemon's promise; NOTHING where it came too late, None while there is time left."""
        if entry.answer is None:
            return NOTHING
        began_ns = self._clock.now_ns()
        try:
            limit_s = ANSWER_WAIT_BEHIND_OTHERS_S if self.are_declined else ANSWER_WAIT_S
            return entry.answer.result(max(0.0, min(limit_s, self._left_s)))
        except LateError:
            if entry.answer_wait is None:
                entry.answer_wait = Deadline(0.0 if self.are_declined else self._wait_s / 2, self._clock)
                self._tally.add("waits_for_the_daemon")
            if not entry.answer_wait.has_passed():
                return None
        except CancelledError:
            pass
        finally:
            self._left_s -= (self._clock.now_ns() - began_ns) / NS_PER_S
        self._tally.add("declined_tokens_late_answer", entry.asked_tokens)
        self.give_back(entry)
        entry.has_given_up = True
        return NOTHING

    def note_taken(self, entry: Tracked) -> None:
        """vLLM has taken the offer."""
        self.are_declined = False
        entry.forget_answer()

    def note_declined(self, entry: Tracked) -> None:
        """vLLM has allocated blocks and has not taken the offer, if there was one: another connector's was better."""
        self.are_declined = self.are_declined or entry.is_offered
        self.give_back(entry)

    def give_back(self, entry: Tracked) -> None:
        """Give the pending answer back, if there is one."""
        if entry.answer is not None:
            self._fetcher.give_back(entry.answer)
        entry.forget_answer()
