"""Promise line: promises of many hits, asked for without waiting, over a connection of their own.

    ask ──receive──► asked ──receive──► Promise with tickets, which other processes turn into leases
     └──no daemon, late, refused, evicted──► NOTHING

A scheduler decides for hundreds of prompts at once and must never hang on the daemon. So what it asks goes out many at a time
in one frame, and is answered in order; nothing here waits but `receive`, as long as its caller allows. No thread is in between:
it would take the interpreter in turns with the scheduler. What is announced goes this way too, because an announcement ends
when its own connection leases the chunks. Invariant: every question is answered once; tickets that are neither claimed nor
given back end by their time to live. One thread, but for `call`; what they share is changed under `_lock`, which nobody holds
while waiting. In a forked child there is no daemon, and no lock is taken.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from kvpool.clock import NS_PER_S, Clock, Deadline, MonotonicClock
from kvpool.errors import DaemonUnreachable, KVPoolError, ProtocolError, Refused
from kvpool.ids import TICKET_BYTES
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.verbs.lease_fetcher import LeaseFetcher
from kvpool_client.verbs.results import Hit

# Questions of one frame, which is answered when all of them are: the first of a burst need not wait for the last (guess).
FRAME_QUESTIONS = 64
# Bytes of levels and tickets that one frame asks for, within what the daemon gives in one answer.
FRAME_ANSWER_BYTES = bm.BATCH_PROMISE_BYTES_MAX
_NO_REQUEST = pr.Promise(b"", 0, "", 1, 0)
# A call that nobody has sent and answered for so long is by its own thread: the line's has no steps (guess).
CALL_TURN_S = 0.02

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Promise:
    """Leading chunks that can be loaded with `tickets`. `tiers`: the level of each chunk."""

    chunks: int
    tickets: tuple[bytes, ...]
    tiers: bytes


NOTHING = Promise(0, (), b"")


class Question:
    """A hit that was asked for, of `chunks`. `answer`: None until it has come, at `answered_ns`. `hit`: what is asked for now,
    after something longer was not there."""

    __slots__ = ("_others", "answer", "answered_ns", "chunks", "hit", "is_given_back", "request")

    def __init__(self, hit: Hit, others: Iterator[tuple[Hit, pr.Promise]]) -> None:
        self._others = others
        self.chunks = hit.chunks
        self.answer: Promise | None = None
        self.answered_ns = 0
        self.is_given_back = False
        self.hit, self.request = next(others, (hit, _NO_REQUEST))

    def __repr__(self) -> str:
        return f"<Question of {self.hit.chunks} chunks: {self.answer}>"

    def goes_on(self) -> bool:
        """Whether there is something else to ask for, which it is from now on."""
        following = next(self._others, None)
        if following is not None:
            self.hit, self.request = following
        return following is not None


class _Call:
    """A request of another thread, and the type of its answer."""

    def __init__(self, request: object, answer: type[object]) -> None:
        self.request = request
        self.answer = answer
        self.future: Future[object] = Future()


class PromiseLine:
    """See the module. Owns `link`, whose session has no other requests."""

    def __init__(
        self,
        link: Link,
        fetcher: LeaseFetcher,
        counters: Counters,
        *,
        tickets: int,
        claims: int | None,
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        """`tickets`, `claims`: of each promise (see `Lease.ticket`). `timeout_s`: the longest time without an answer."""
        self._link = link
        self._fetcher = fetcher
        self._counters = counters
        self._tickets = tickets
        self._claims = claims or 0
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fresh: list[Question] = []
        self._returned: list[bytes] = []
        self.calls: deque[_Call] = deque()  # of other threads; any thread appends
        # The number of each frame, and the questions in it.
        self.asked: deque[tuple[int, Sequence[Question] | _Call]] = deque()
        self._sequence = itertools.count(1)
        self._session: Session | None = None
        self._reader = frames.FrameReader()
        self._unsent = bytearray()
        self._patience = Deadline(0.0, self._clock)

    def __repr__(self) -> str:
        return f"<PromiseLine {len(self._fresh)} to be asked, {len(self.asked)} frames asked>"

    @property
    def is_busy(self) -> bool:
        """Whether something is to be sent or answered."""
        return bool(self.asked or self._fresh or self._returned or self._unsent or self.calls)

    @property
    def is_connected(self) -> bool:
        """Whether a daemon is there that gives promises."""
        return self._link.session is not None

    def ask_promise(self, hit: Hit) -> Question:
        """Have a promise of this hit fetched: the question goes out with the next `receive`. An empty hit has none. Raises
        InvalidArgument for another Pool's hit."""
        self._fetcher.check(hit)
        question = Question(hit, self._fetcher.promises_of(hit, self._tickets, self._claims))
        if question.request is _NO_REQUEST or self._is_inherited:
            self._settle(question, NOTHING)
            return question
        with self._lock:
            self._fresh.append(question)
        return question

    def give_back(self, question: Question) -> None:
        """A question whose answer is of no use: the tickets end, now or when they come."""
        if self._is_inherited:
            return
        with self._lock:
            question.is_given_back = True
            if question.answer is not None:
                self._returned += question.answer.tickets
                question.answer = NOTHING

    def call(self, request: object, answer: type[Answer], timeout_s: float) -> Answer:
        """A round trip for another thread, which waits until the line's own has sent it and taken the answer, and does so
        itself where that has nothing to do. Raises Refused or DaemonUnreachable."""
        call = _Call(request, answer)
        self.calls.append(call)
        deadline = Deadline(timeout_s)
        while not deadline.has_passed() and not wait((call.future,), min(CALL_TURN_S, deadline.remaining_s())).done:
            self.receive()
        if not call.future.done():
            call.future.cancel()
            raise DaemonUnreachable(f"no answer to {type(request).__name__} within {timeout_s:g} s")
        return call.future.result()  # type: ignore[return-value]  # of the type that it was made with

    def age_s(self, question: Question) -> float:
        """How long ago a question was answered."""
        return (self._clock.now_ns() - question.answered_ns) / NS_PER_S

    def receive(self, wait_s: float = 0.0) -> None:
        """Send what is to be asked and given back, and take the answers that have come; wait at most so long for the next."""
        deadline = Deadline(wait_s)
        while self.is_busy and not self._is_inherited:
            with self._lock:
                has_received = self._exchange()
                session, has_more, is_asked = self._session, bool(self._unsent), bool(self.asked)
            left_s = deadline.remaining_s() if wait_s > 0 else 0.0
            if session is None or has_received or not is_asked or left_s <= 0:
                return
            session.wait_for_exchange(left_s, has_more=has_more)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's line."""
        return os.getpid() != self._pid

    def _exchange(self) -> bool:
        """Send and take what there is, without waiting. Whether anything has come. Under `_lock`."""
        session = self._link.session
        if session is not self._session or session is None:
            self._begin_anew(session)
        if session is None:
            return False
        has_received = False
        try:
            self._write()
            while True:
                unsent = len(self._unsent)
                received = session.exchange(self._unsent)
                if received or len(self._unsent) < unsent:  # silence is what follows the last byte, of either side
                    self._patience = Deadline(self._timeout_s, self._clock)
                if not received:
                    break
                has_received = True
                for frame in self._reader.feed(received):
                    self._take(*frame)
                if not self.asked:
                    break
            if self.asked and self._patience.has_passed():
                raise DaemonUnreachable(f"no promise has come for {self._timeout_s:g} s")
        except KVPoolError as error:
            session.end_session(str(error))
            self._link.note_failure(session, error)
            self._begin_anew(None)
        return has_received

    def _begin_anew(self, session: Session | None) -> None:
        """Answer what an ended session was asked, and all that is to be asked where there is none."""
        for _, asked in self.asked:
            self._give_up(asked)
        if session is None:
            self._end(self._fresh)
            self._fresh = []
            while self.calls:
                call = self.calls.popleft()
                if call.future.set_running_or_notify_cancel():
                    self._give_up(call)
        self.asked.clear()
        self._returned.clear()
        self._unsent.clear()
        self._reader = frames.FrameReader()
        self._session = session

    def _write(self) -> None:
        """Put what is to be asked and given back into frames."""
        if not self.asked:
            self._patience = Deadline(self._timeout_s, self._clock)
        for ticket in self._returned:
            self._put(m.Claim(ticket), ())
        self._returned.clear()
        while self.calls:
            call = self.calls.popleft()
            if call.future.set_running_or_notify_cancel():
                self._put(call.request, call)
        batch: list[Question] = []
        bodies: list[bytes] = []
        size = answer_bytes = 0
        for question in self._fresh:
            if question.is_given_back:
                self._settle(question, NOTHING)
                continue
            body = m.encode(question.request, 0)[frames.LENGTH.size :]
            promised = self._fetcher.rows_of(question.request.chunks) + self._tickets * TICKET_BYTES
            is_full = len(batch) == FRAME_QUESTIONS or size + len(body) > bm.BATCH_BYTES_MAX
            if batch and (is_full or answer_bytes + promised > FRAME_ANSWER_BYTES):
                self._put(bm.Batch(bodies), batch)
                batch, bodies, size, answer_bytes = [], [], 0, 0
            batch.append(question)
            bodies.append(body)
            size += len(body)
            answer_bytes += promised
        if batch:
            self._put(bm.Batch(bodies), batch)
        self._fresh = []

    def _put(self, record: object, asked: Sequence[Question] | _Call) -> None:
        number = next(self._sequence)
        self._unsent += m.encode(record, number)
        self.asked.append((number, asked))

    def _take(self, kind: int, sequence: int, values: list[object]) -> None:
        """One answer. Raises ProtocolError, and Refused where the daemon ends the connection."""
        if kind == m.Failure.KIND and not sequence:
            failure = m.decode_as(m.Failure, values)
            raise Refused(failure.code, failure.message)
        expected, asked = self.asked[0] if self.asked else (0, ())
        if sequence != expected:
            raise ProtocolError(f"answer of kind {kind} has number {sequence}, expected {expected}")
        self.asked.popleft()
        if isinstance(asked, _Call):
            self._end_call(asked, kind, values)
        elif asked and kind == m.Failure.KIND:
            self._end(asked)
        elif asked:  # else it is of what was given back
            self._answer_each(asked, kind, values)

    def _answer_each(self, questions: Sequence[Question], kind: int, values: list[object]) -> None:
        try:
            promises = self._read_each(kind, values, questions)
        except ProtocolError:
            self._end(questions)
            raise
        for question, promise in zip(questions, promises, strict=True):
            self._answer(question, promise)

    def _end_call(self, call: _Call, kind: int, values: list[object]) -> None:
        try:
            if kind == m.Failure.KIND:
                failure = m.decode_as(m.Failure, values)
                call.future.set_exception(Refused(failure.code, failure.message))
                return
            if kind != call.answer.KIND:  # type: ignore[attr-defined]  # every record has KIND
                raise ProtocolError(f"answer is of kind {kind}, expected {call.answer.__name__}")
            call.future.set_result(m.decode_as(call.answer, values))
        except ProtocolError:
            self._give_up(call)
            raise

    def _give_up(self, asked: Sequence[Question] | _Call) -> None:
        if not isinstance(asked, _Call):
            self._end(asked)
        elif not asked.future.done():
            asked.future.set_exception(DaemonUnreachable("the connection to the daemon has ended"))

    def _read_each(self, kind: int, values: list[object], questions: Sequence[Question]) -> list[Promise]:
        answers = m.decode_as(bm.Batched, values).answers if kind == bm.Batched.KIND else ()
        if len(answers) != len(questions):
            raise ProtocolError(f"answer of kind {kind} has {len(answers)} promises, expected {len(questions)}")
        return [self._read(question.hit, body) for question, body in zip(questions, answers, strict=True)]

    def _read(self, hit: Hit, body: object) -> Promise:
        if not isinstance(body, bytes):
            raise ProtocolError(f"a batch has an answer of {type(body).__name__}, expected bytes")
        kind, _, values = frames.decode(body)
        if kind != pr.Promised.KIND:
            return NOTHING  # a Failure
        promised = m.decode_as(pr.Promised, values)
        size, rest = divmod(len(promised.tickets), self._tickets)
        if not promised.chunks:
            return NOTHING
        if rest or not size or not 0 < promised.chunks <= hit.chunks:
            raise ProtocolError(
                f"a promise has {promised.chunks} chunks and {len(promised.tickets)} bytes of tickets, expected "
                f"1..{hit.chunks} and {self._tickets} tickets"
            )
        tickets = tuple(promised.tickets[place * size : (place + 1) * size] for place in range(self._tickets))
        return Promise(promised.chunks, tickets, self._fetcher.promised_levels(hit, promised))

    def _answer(self, question: Question, promise: Promise) -> None:
        if question.is_given_back:
            self._returned += promise.tickets
            self._settle(question, NOTHING)
        elif promise is NOTHING and question.goes_on():
            self._fresh.append(question)
        else:
            self._settle(question, promise)
            self._counters.count("acquired_chunks", promise.chunks)

    def _end(self, questions: Sequence[Question]) -> None:
        for question in questions:
            self._settle(question, NOTHING)

    def _settle(self, question: Question, promise: Promise) -> None:
        question.answered_ns = self._clock.now_ns()  # before another thread can see the answer
        question.answer = promise
