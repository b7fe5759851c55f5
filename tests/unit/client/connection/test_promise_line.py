"""Promise line over a session of the test's: what it sends, and that every question is answered once, whatever comes back."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.errors import DaemonUnreachable, Refused
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.states import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.promise_line import NOTHING, PromiseLine
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease_fetcher import LeaseFetcher
from tests.rigs.clock import HandClock
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.payload import tokens_of

TIMEOUT_S = 5.0
TICKET = b"t" * 32


class ScriptedSession:
    """Takes frames, `room` bytes at a call, and answers them with what the test says."""

    def __init__(self) -> None:
        self.is_alive = True
        self.room = 1 << 20
        self.answers_itself = False  # the first frame, when it is there
        self.sent: list[Any] = []
        self.waits: list[bool] = []
        self._taken = b""
        self._answers = b""

    def wait_for_exchange(self, wait_s: float, *, has_more: bool) -> None:
        self.waits.append(has_more)

    def exchange(self, unsent: bytearray) -> bytes:
        if not self.is_alive:
            raise DaemonUnreachable("it has ended")
        self._taken += bytes(unsent[: self.room])
        del unsent[: self.room]
        reader = frames.FrameReader()
        for kind, sequence, values in reader.feed(self._taken):
            record = {bm.Batch.KIND: bm.Batch, m.Announce.KIND: m.Announce}.get(kind, m.Claim)
            self.sent.append((sequence, m.decode_as(record, values)))
        self._taken = self._taken[len(self._taken) - reader.waiting :]
        if self.answers_itself and len(self.sent) == 1:
            self.answer_batch(pr.Promised(1, b"\x01", TICKET))
        answers, self._answers = self._answers, b""
        return answers

    def answer(self, record: object, sequence: int) -> None:
        self._answers += m.encode(record, sequence)

    def answer_batch(self, *promised: object) -> None:
        """To the last frame."""
        bodies = [m.encode(record, 0)[frames.LENGTH.size :] for record in promised]
        self.answer(bm.Batched(bodies), self.sent[-1][0])

    def end_session(self, reason: str) -> None:
        self.is_alive = False


class ScriptedLink:
    def __init__(self) -> None:
        self.session: ScriptedSession | None = ScriptedSession()
        self.failures: list[str] = []

    def note_failure(self, session: ScriptedSession, error: Exception) -> None:
        assert session is self.session
        assert not session.is_alive
        self.failures.append(str(error))
        self.session = None


class Setting:
    def __init__(self) -> None:
        self.link, self.clock, self.counters = ScriptedLink(), HandClock(0), Counters()
        self._pool = kv.connect("/nonexistent/kvpool.sock", model="model", layout=SMALL)
        link: Any = self.link
        counters = self.counters
        fetcher = LeaseFetcher(
            Namespace(self._pool.model, SMALL, "/nonexistent/kvpool.sock"),
            link,
            counters,
            finder=Finder(SMALL, link, counters, timeout_s=TIMEOUT_S),
            estimate_s=lambda _chunks: 0.0,
            timeout_s=TIMEOUT_S,
        )
        self.line = PromiseLine(
            link,
            fetcher,
            self.counters,
            tickets=1,
            claims=None,
            timeout_s=TIMEOUT_S,
            clock=self.clock,
        )
        self._pool.close()

    @property
    def session(self) -> ScriptedSession:
        assert self.link.session is not None
        return self.link.session

    def hit(self, chunks: int = 3, level: Level = Level.DRAM) -> kv.Hit:
        keys = self._pool.keys(tokens_of(1, chunks * SMALL.chunk_tokens))
        return kv.Hit(chunks, chunks * SMALL.chunk_tokens, bytes([level]) * chunks, keys)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_questions_go_out_together_and_are_answered_one_by_one(setting: Setting) -> None:
    first, second = (setting.line.ask_promise(setting.hit()) for _ in range(2))
    setting.line.receive()
    ((_, batch),) = setting.session.sent
    assert len(batch.requests) == 2
    assert first.answer is None
    setting.session.answer_batch(pr.Promised(3, b"\x01\x01\x01", TICKET), m.Failure("full", "no room"))
    setting.line.receive()
    assert first.answer is not None
    assert (first.answer.chunks, first.answer.tickets, first.answer.tiers) == (3, (TICKET,), b"\x01\x01\x01")
    assert second.answer is None, "by its last key alone it was not found: now by all of them"
    setting.line.receive()
    asked = m.decode_as(pr.Promise, frames.decode(setting.session.sent[-1][1].requests[0])[2])
    assert (len(asked.keys), asked.chunks) == (3 * 32, 3)
    setting.session.answer_batch(pr.Promised(0, b"", b""))
    setting.line.receive()
    assert second.answer is NOTHING
    assert not setting.line.is_busy
    assert setting.counters.totals()["acquired_chunks"] == 3


def test_a_hit_of_other_nodes_is_asked_for_by_its_keys_once(setting: Setting) -> None:
    question = setting.line.ask_promise(setting.hit(level=Level.PEER))
    setting.line.receive()
    setting.session.answer_batch(pr.Promised(0, b"", b""))
    setting.line.receive()
    assert question.answer is NOTHING
    assert len(setting.session.sent) == 1


def test_a_frame_that_the_socket_takes_in_pieces_is_sent_whole(setting: Setting) -> None:
    setting.session.room = 7
    question = setting.line.ask_promise(setting.hit())
    for _ in range(100):
        setting.line.receive()
    assert len(setting.session.sent) == 1
    setting.session.answer_batch(pr.Promised(1, b"\x01", TICKET))
    setting.line.receive()
    assert question.answer is not None
    assert question.answer.chunks == 1


def test_what_waits_for_an_answer_sends_the_rest_of_its_question_meanwhile(setting: Setting) -> None:
    setting.session.room = 7
    setting.session.answers_itself = True
    question = setting.line.ask_promise(setting.hit())
    setting.line.receive(60.0)
    assert question.answer is not None
    assert question.answer.chunks == 1
    assert set(setting.session.waits) == {True}, "it waited for room, not for the answer alone"


def test_an_empty_hit_and_a_forked_child_ask_nobody(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting.line.ask_promise(setting.hit(0)).answer is NOTHING
    kept = setting.line.ask_promise(setting.hit())
    setting.line._lock.acquire()  # as another thread held it at the fork
    monkeypatch.setattr(setting.line, "_pid", -1)
    asked = setting.line.ask_promise(setting.hit())
    assert asked.answer is NOTHING
    setting.line.give_back(kept)
    setting.line.receive(1.0)
    with pytest.raises(DaemonUnreachable):
        setting.line.call(m.Announce(b"k" * 32), m.Announced, 0.01)
    assert setting.session.sent == []


def test_a_daemon_that_ends_the_connection_is_quoted(setting: Setting) -> None:
    question = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    setting.session.answer(m.Failure("protocol", "claims is of type str, expected int"), 0)
    setting.line.receive()
    assert question.answer is NOTHING
    (failure,) = setting.link.failures
    assert failure.endswith("claims is of type str, expected int")


def test_the_time_of_an_answer_begins_when_all_of_the_question_is_sent(setting: Setting) -> None:
    setting.session.room = 16
    question = setting.line.ask_promise(setting.hit())
    while not setting.session.sent:
        setting.line.receive()
        setting.clock.now_s += 0.9 * TIMEOUT_S
    setting.line.receive()
    assert question.answer is None, "nothing was late"
    setting.clock.now_s += TIMEOUT_S
    setting.line.receive()
    assert question.answer is NOTHING


def test_what_is_given_back_is_claimed_by_nobody_else(setting: Setting) -> None:
    questions = unsent, _, asked = [setting.line.ask_promise(setting.hit()) for _ in range(3)]
    setting.line.give_back(unsent)
    setting.line.receive()
    assert len(setting.session.sent[-1][1].requests) == 2
    setting.session.answer_batch(*(pr.Promised(3, b"\x01" * 3, bytes([number]) * 32) for number in (1, 2)))
    setting.line.give_back(asked)
    setting.line.receive()
    setting.line.receive()
    assert [record.ticket for _, record in setting.session.sent[1:]] == [b"\x02" * 32]
    assert [question.answer is NOTHING for question in questions] == [True, False, True]
    assert setting.line.is_busy
    setting.session.answer(m.Leased(0, 0, b"", b"", b""), setting.session.sent[-1][0])
    setting.line.receive()
    assert not setting.line.is_busy


def _of_another_number(session: ScriptedSession) -> None:
    session.answer(bm.Batched([]), 77)


def _of_too_many(session: ScriptedSession) -> None:
    session.answer_batch(*[pr.Promised(0, b"", b"")] * 3)


def _of_another_kind(session: ScriptedSession) -> None:
    session.answer(m.Done(), session.sent[-1][0])


def _without_bytes(session: ScriptedSession) -> None:
    session.answer(bm.Batched([7, 7]), session.sent[-1][0])


def _without_tickets(session: ScriptedSession) -> None:
    session.answer_batch(pr.Promised(3, b"\x01" * 3, TICKET), pr.Promised(2, b"\x01" * 2, b""))


def _with_more_chunks(session: ScriptedSession) -> None:
    session.answer_batch(pr.Promised(0, b"", b""), pr.Promised(4, b"\x01" * 4, TICKET))


def _with_other_levels(session: ScriptedSession) -> None:
    session.answer_batch(pr.Promised(0, b"", b""), pr.Promised(3, b"\x01" * 2, TICKET))


def _unasked(session: ScriptedSession) -> None:
    session.answer_batch(*[pr.Promised(3, b"\x01" * 3, TICKET)] * 2)
    session.answer(m.Done(), session.sent[-1][0] + 1)


@pytest.mark.parametrize(
    "answer",
    [
        _of_another_number,
        _of_too_many,
        _of_another_kind,
        _without_bytes,
        _without_tickets,
        _with_more_chunks,
        _with_other_levels,
        _unasked,
    ],
)
def test_a_wrong_answer_ends_the_session_and_leaves_no_question_open(
    setting: Setting, answer: Callable[[ScriptedSession], None]
) -> None:
    questions = [setting.line.ask_promise(setting.hit()) for _ in range(2)]
    setting.line.receive()
    session = setting.session
    answer(session)
    setting.line.receive()
    assert not session.is_alive
    assert len(setting.link.failures) == 1
    assert all(question.answer is not None for question in questions)
    later = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    assert later.answer is NOTHING, "nobody is there to ask"


def test_a_refused_frame_is_a_miss_for_all_of_it(setting: Setting) -> None:
    questions = [setting.line.ask_promise(setting.hit(1)) for _ in range(2)]
    setting.line.receive()
    setting.session.answer(m.Failure("refused", "why"), setting.session.sent[-1][0])
    setting.line.receive()
    assert [question.answer for question in questions] == [NOTHING, NOTHING]
    assert setting.session.is_alive


def test_a_daemon_without_an_answer_is_left_after_the_time_of_a_round_trip(setting: Setting) -> None:
    question = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    setting.clock.now_s = TIMEOUT_S - 0.1
    setting.line.receive()
    assert question.answer is None
    setting.clock.now_s = TIMEOUT_S + 0.1
    setting.line.receive()
    assert question.answer is NOTHING
    assert setting.link.failures == [f"no promise has come for {TIMEOUT_S:g} s"]


def test_each_answer_gives_the_rest_as_much_time_again(setting: Setting) -> None:
    first = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    setting.clock.now_s = 0.9 * TIMEOUT_S
    second = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    setting.session.answer(bm.Batched([_body(pr.Promised(1, b"\x01", TICKET))]), setting.session.sent[0][0])
    setting.line.receive()
    assert first.answer is not None
    setting.clock.now_s = 1.8 * TIMEOUT_S
    setting.line.receive()
    assert second.answer is None
    assert setting.session.is_alive


def test_a_new_session_is_asked_what_was_not_sent_yet(setting: Setting) -> None:
    lost = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    setting.link.session = following = ScriptedSession()
    kept = setting.line.ask_promise(setting.hit())
    setting.line.receive()
    assert lost.answer is NOTHING
    assert kept.answer is None
    assert len(following.sent) == 1


def _body(record: object) -> bytes:
    return m.encode(record, 0)[frames.LENGTH.size :]


def test_frames_are_cut_where_an_answer_has_no_more_room(setting: Setting) -> None:
    chunks = bm.BATCH_PROMISE_BYTES_MAX // 2 - 32
    hit = setting.hit()
    for _ in range(3):
        question = setting.line.ask_promise(hit)
        question.request = pr.Promise(b"k" * 32, chunks, "", 1, 0)
    setting.line.receive()
    assert [len(batch.requests) for _, batch in setting.session.sent] == [2, 1]


def called(
    setting: Setting, answer: Callable[[ScriptedSession], None] | None, frames_sent: int = 1
) -> "Future[m.Announced]":
    """Another thread's request, once the line has ended it."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(setting.line.call, m.Announce(b"k" * 32), m.Announced, 60.0)
        session = setting.link.session

        def is_sent() -> bool:
            setting.line.receive()
            return session is None or len(session.sent) >= frames_sent

        wait_until(is_sent, "it has been sent")
        if session is not None and answer is not None:
            answer(session)
        elif session is not None:
            setting.link.session = None

        def has_ended() -> bool:
            setting.line.receive()
            return found.done()

        wait_until(has_ended, "it has ended")
    return found


def test_a_request_of_another_thread_goes_with_the_questions(setting: Setting) -> None:
    question = setting.line.ask_promise(setting.hit(1))

    def answer(session: ScriptedSession) -> None:
        for number, record in session.sent:
            if isinstance(record, m.Announce):
                session.answer(m.Announced(1, 0), number)
            else:
                session.answer(bm.Batched([_body(pr.Promised(1, b"\x01", TICKET))]), number)

    assert called(setting, answer, 2).result() == m.Announced(1, 0)
    assert question.answer is not None
    assert question.answer.chunks == 1


def test_a_refusal_and_an_end_reach_the_other_thread(setting: Setting) -> None:
    refused = called(setting, lambda session: session.answer(m.Failure("group", "no"), session.sent[-1][0]))
    with pytest.raises(Refused, match="group: no"):
        refused.result()
    setting.session.sent.clear()
    with pytest.raises(DaemonUnreachable, match="has ended"):
        called(setting, None).result()
    with pytest.raises(DaemonUnreachable, match="has ended"):
        called(setting, None).result()


def test_a_call_of_a_line_that_takes_no_step_is_sent_and_answered_by_its_own_thread(setting: Setting) -> None:
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(setting.line.call, m.Announce(b"k" * 32), m.Announced, 600.0)
        wait_until(lambda: bool(setting.session.sent), "it has been sent")
        setting.session.answer(m.Announced(1, 0), setting.session.sent[-1][0])
        assert found.result(180.0) == m.Announced(1, 0)
