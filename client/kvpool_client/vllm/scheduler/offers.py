"""Offers to vLLM: the daemon's promise for a request's prefix, and how long the scheduler waits for it.

Questions go out together, over a connection of their own (`promise_line`). All that a step does for new requests, from their
arrival to their loads, is within STEP_S, or IDLE_STEP_S where nothing was computed that it would delay: what does not fit is
left for the next step before it is looked up. A request is held back for its answer no longer than computing would take by the
engine's own measurement, half of `wait_s` where nothing is measured or it is to load always; what comes later is taken at
vLLM's next call about the request. Invariant: `Tracked.is_offered` is true only between an answer to vLLM above 0 and vLLM's
next call about that request. The scheduler's thread.
"""

from kvpool.clock import NS_PER_S, Clock, Deadline
from kvpool_client.connection.promise_line import NOTHING, Promise, PromiseLine, Question
from kvpool_client.engines.load_cost import RateEstimator
from kvpool_client.verbs.results import Hit
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.statistics import Tally

# What one step may spend on new requests.
STEP_S = 0.005
# The same while the engine computes nothing: a burst of hundreds is then asked about in a step or two (guess).
IDLE_STEP_S = 0.05
# Of it, what it may wait for answers. One usually takes a tenth of a millisecond: a few requests begin in the step in which
# they were asked about, and of a burst many are asked about at once (guess).
ANSWER_WAIT_S = 0.001
STEP_NS, IDLE_STEP_NS, ANSWER_WAIT_NS = (int(each * NS_PER_S) for each in (STEP_S, IDLE_STEP_S, ANSWER_WAIT_S))
# A question of vLLM's about a request for which a step can do nothing more, with all that it passes through (measured: 2 to 4).
# At most so much of the next step is left to as many of them as the last one had.
POLL_NS = 3_000
POLLS_NS_MAX = STEP_NS // 2
# A promise older than this is fetched again: well below the shortest useful time to live of leases (guess).
PROMISE_AGE_MAX_S = 5.0


class Offers:
    """See the module. `are_declined`: another connector's offer was better the last time."""

    def __init__(
        self, line: PromiseLine, settings: Settings, *, rates: RateEstimator, tally: Tally, clock: Clock
    ) -> None:
        self.are_declined = False
        self._line = line
        self._settings = settings
        self._rates = rates
        self._tally = tally
        self._clock = clock
        self._began_ns = 0  # of what is being done for requests now
        self._polls = 0  # in this step
        self._is_open = False  # the line may have something to send, or an answer to come
        self._step_ns = self._left_ns = STEP_NS
        self._wait_left_ns = ANSWER_WAIT_NS
        self._has_received = False

    def __repr__(self) -> str:
        return f"<Offers {'declined' if self.are_declined else 'taken'}, {self._left_ns / NS_PER_S:.3f} s left in this step>"

    def begin_step(self, *, is_idle: bool) -> None:
        """What was asked goes out, and the scheduler may spend time on new requests again. `is_idle`: nothing is computed."""
        if self._is_open or self._line.calls or self._line.asked:  # no call of a step without work
            self._line.receive()
            self._is_open = self._line.is_busy
        self._step_ns = self._left_ns = IDLE_STEP_NS if is_idle else STEP_NS
        self._wait_left_ns = ANSWER_WAIT_NS
        self._has_received = False
        if self._polls:
            self._left_ns -= min(POLLS_NS_MAX, POLL_NS * self._polls)
            self._polls = 0

    @property
    def has_time(self) -> bool:
        """Whether this step may look another request up."""
        return self._left_ns > 0

    @property
    def has_time_for_arrivals(self) -> bool:
        """Whether it may look at a request that has just come: half of its time is for those that wait longer."""
        return self._left_ns > self._step_ns // 2

    def has_done_all(self, entry: Tracked | None, held_tokens: int) -> bool:
        """Whether this step has done for a request what it may: no time is left to look it up, or its answer was looked for,
        and the request goes on waiting. vLLM asks again about each of hundreds of such requests at every step."""
        is_done = self._has_done_all(entry, held_tokens)
        self._polls += is_done
        return is_done

    def _has_done_all(self, entry: Tracked | None, held_tokens: int) -> bool:
        question = entry.answer if entry is not None else None
        if entry is None or question is None:
            return self._left_ns <= 0 and not self.are_declined
        if question.answer is not None or entry.held_tokens != held_tokens or entry.answer_wait is None:
            return False
        return self._has_received and self._wait_left_ns <= 0 and not entry.answer_wait.has_passed()

    def begin_work(self) -> None:
        """What is done from now on for new requests counts as this step's."""
        self._began_ns = self._clock.now_ns()

    def end_work(self) -> None:
        """It has been done."""
        self._left_ns -= self._clock.now_ns() - self._began_ns

    def is_known(self, entry: Tracked, held_tokens: int) -> bool:
        """Whether a promise for what follows these tokens is pending or known, and not too old."""
        question = entry.answer
        if question is None or entry.held_tokens != held_tokens:
            return False
        return question.answer is None or self._line.age_s(question) < PROMISE_AGE_MAX_S

    def ask_promise(self, entry: Tracked, hit: Hit, held_tokens: int) -> bool:
        """Ask for a promise of what the hit has after `held_tokens`; False where that is nothing."""
        if entry.answer is not None:
            self._line.give_back(entry.answer)
        entry.answer_wait = None
        entry.held_tokens = held_tokens
        entry.asked_tokens = hit.tokens - held_tokens
        entry.answer = self._line.ask_promise(hit) if hit.tokens > held_tokens else None
        self._is_open = True
        return entry.answer is not None

    def is_pending(self, entry: Tracked, held_tokens: int) -> bool:
        """Whether to go on waiting for the answer to what was asked. Waits itself, within what this step may spend."""
        question = entry.answer
        if question is None or question.answer is not None or entry.held_tokens != held_tokens:
            return False
        if not self._has_received:
            self._has_received = True
            self._line.receive()
        if question.answer is None and self._wait_left_ns > 0:
            self._wait(question)
        if question.answer is not None:
            return False
        if entry.answer_wait is None:
            patience_s = self._patience_s(entry)
            entry.answer_wait = Deadline(patience_s, self._clock)
            self._tally.count("waits_for_the_daemon", int(patience_s > 0))
        return not entry.answer_wait.has_passed()

    def promise(self, entry: Tracked) -> Promise:
        """The daemon's promise; NOTHING while it has not come."""
        return NOTHING if entry.answer is None else entry.answer.answer or NOTHING

    def chunks_kept(self, entry: Tracked) -> int | None:
        """How many leading chunks were promised of more that were asked for: the others have gone. None: all, or no answer
        has come."""
        question = entry.answer
        if question is None or question.answer is None or question.answer.chunks >= question.chunks:
            return None
        return question.answer.chunks

    def _wait(self, question: Question) -> None:
        """Wait for an answer, within what this step may wait."""
        began_ns = now_ns = self._clock.now_ns()
        while question.answer is None and (left_ns := self._wait_left_ns - (now_ns - began_ns)) > 0:
            self._line.receive(left_ns / NS_PER_S)
            now_ns = self._clock.now_ns()
        self._wait_left_ns -= now_ns - began_ns

    def _patience_s(self, entry: Tracked) -> float:
        rates, wait_s = self._rates.rates(), self._settings.wait_s
        if self.are_declined or not wait_s:
            return 0.0
        if self._settings.always_load or not rates.prefill_tokens_per_s:
            return wait_s / 2
        return entry.asked_tokens / rates.prefill_tokens_per_s

    def note_taken(self, entry: Tracked) -> None:
        """vLLM has taken the offer."""
        self.are_declined = False
        entry.forget_answer()

    def note_declined(self, entry: Tracked) -> None:
        """vLLM has allocated blocks and has not taken the offer, if there was one: another connector's was better, or the
        answer had not come."""
        self.are_declined = self.are_declined or entry.is_offered
        if entry.answer is not None and entry.answer.answer is None:
            self._tally.count("declined_tokens_late_answer", entry.asked_tokens)
        self.give_back(entry)

    def give_back(self, entry: Tracked) -> None:
        """Give the pending answer back, if there is one."""
        if entry.answer is not None:
            self._line.give_back(entry.answer)
            self._is_open = True
        entry.forget_answer()
