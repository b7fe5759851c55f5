"""One connection's protocol over a recording transport: turns, waiting, a peer that does not read, a lack of memory."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvpool.clock import Clock
from kvpool.errors import ProtocolError, Refused
from kvpool.ids import ConnectionId
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.server.connections.connection import AnswerWithDescriptor, Connection
from kvpool.server.connections.turns import SLICE_NS, TURN_NS, Turns
from tests.rigs.clock import HandClock
from tests.rigs.recording_transport import Transport, connection_over


def _spend(clock: HandClock, spent_ns: int) -> m.Done:
    """A request that takes so long."""
    clock.ns += spent_ns
    return m.Done()


def _connection(
    handler: Callable[[m.IssueTicket], object | Awaitable[object]],
    failures: list[BaseException] | None = None,
    *,
    clock: Clock | None = None,
    turns: Turns | None = None,
) -> tuple[Connection, Transport]:
    return connection_over(handler, clock or HandClock(), failures=failures, turns=turns)


def _requests(first: int, count: int) -> bytes:
    return b"".join(m.encode(m.IssueTicket(number), number) for number in range(first, first + count))


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_many_requests_at_once_are_served_for_a_turn_each_time() -> None:
    async def run() -> None:
        clock = HandClock()
        connection, transport = _connection(lambda _: _spend(clock, SLICE_NS // 2), clock=clock)
        in_turn = 2 * TURN_NS // SLICE_NS
        connection.data_received(_requests(0, 3 * in_turn + 1))
        assert len(transport.answers) == in_turn
        assert not transport.reads
        await _turns(1)
        assert len(transport.answers) == 2 * in_turn
        await _turns(3)
        assert [sequence for _, sequence, _ in transport.answers] == list(range(3 * in_turn + 1))
        assert transport.reads

    asyncio.run(run())


def test_a_connection_that_waits_for_a_turn_is_not_read() -> None:
    async def run() -> None:
        clock = HandClock()
        turns = Turns(clock)
        flood, _ = _connection(lambda _: _spend(clock, TURN_NS), clock=clock, turns=turns)
        later, transport = _connection(lambda _: m.Done(), clock=clock, turns=turns)
        flood.data_received(_requests(0, 3))
        later.data_received(_requests(0, 1))
        assert not transport.answers
        assert not transport.reads, "what it sends on stays in its socket"
        await _turns(2)
        assert len(transport.answers) == 1
        assert transport.reads

    asyncio.run(run())


def test_a_request_in_several_reads_is_served_when_it_is_whole_and_its_bytes_are_counted_until_then() -> None:
    async def run() -> None:
        connection, transport = _connection(lambda _: m.Done())
        counted: list[int] = []
        connection._on_unfinished = lambda _, unfinished: counted.append(unfinished)
        sent = _requests(7, 1)
        for first in range(0, len(sent), 3):
            assert not transport.answers
            connection.data_received(sent[first : first + 3])
        assert [sequence for _, sequence, _ in transport.answers] == [7]
        assert counted == [*range(3, len(sent), 3), 0]
        connection.data_received(_requests(8, 1) + sent[:5])
        assert [sequence for _, sequence, _ in transport.answers] == [7, 8]
        assert counted[-1] == 5
        connection.data_received(sent[5:] + (2**31).to_bytes(4, "little")[:2])
        assert [sequence for _, sequence, _ in transport.answers] == [7, 8, 7]
        connection.data_received((2**31).to_bytes(4, "little")[2:])
        assert connection.state == "ending", "no frame has so many bytes"

    asyncio.run(run())


def test_the_connection_with_the_least_use_comes_before_floods() -> None:
    async def run() -> None:
        clock = HandClock()
        turns = Turns(clock)
        floods = [_connection(lambda _: _spend(clock, SLICE_NS), clock=clock, turns=turns) for _ in range(12)]
        for connection, _ in floods:
            connection.data_received(_requests(0, 1000))
        await _turns(20)
        served = [len(transport.answers) for _, transport in floods]
        assert max(served) - min(served) <= TURN_NS // SLICE_NS + 1, "each has had its share"
        begun_ns = clock.now_ns()
        late_ns: list[int] = []

        def note(_: m.IssueTicket) -> m.Done:
            late_ns.append(clock.now_ns() - begun_ns)
            return _spend(clock, 1000)

        honest, transport = _connection(note, clock=clock, turns=turns)
        for number in range(30):
            begun_ns = clock.now_ns()
            honest.data_received(_requests(number, 1))
            while len(transport.answers) == number:
                await _turns(1)
        assert max(late_ns) <= TURN_NS + SLICE_NS, "it waits for what is under way, and not for all the others"

    asyncio.run(run())


def test_a_thread_that_has_been_idle_serves_at_once() -> None:
    async def run() -> None:
        clock = HandClock()
        connection, transport = _connection(lambda _: _spend(clock, 2 * TURN_NS), clock=clock)
        connection.data_received(_requests(0, 1))
        connection.data_received(_requests(1, 1))
        assert len(transport.answers) == 1
        await _turns(2)
        assert len(transport.answers) == 2
        clock.ns += 10 * TURN_NS
        connection.data_received(_requests(2, 1))
        assert len(transport.answers) == 3

    asyncio.run(run())


def test_a_waiting_request_holds_back_the_later_ones() -> None:
    async def run() -> None:
        gate: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        connection, transport = _connection(lambda request: gate if request.lease == 1 else m.Done())
        connection.data_received(_requests(0, 4))
        assert [sequence for _, sequence, _ in transport.answers] == [0]
        assert not transport.reads
        gate.set_result(m.Done())
        await _turns(2)
        assert [sequence for _, sequence, _ in transport.answers] == [0, 1, 2, 3]
        assert transport.reads

    asyncio.run(run())


def test_a_peer_that_does_not_read_is_served_no_more_until_it_does() -> None:
    async def run() -> None:
        connection, transport = _connection(lambda _: m.Done())
        connection.pause_writing()
        connection.data_received(_requests(0, 3))
        await _turns(3)
        assert transport.answers == []
        assert not transport.reads
        connection.resume_writing()
        assert len(transport.answers) == 3
        assert transport.reads

    asyncio.run(run())


def test_one_way_requests_are_served_in_order_and_never_answered() -> None:
    served: list[int] = []

    def handler(request: m.IssueTicket | one_way.LandSaved) -> object:
        number = request.lease if isinstance(request, m.IssueTicket) else request.reservation
        served.append(number)
        if number in (3, 5):
            raise Refused("reservation", "no such one") if number == 3 else ValueError("unexpected")
        return m.Done()

    async def run() -> None:
        connection, transport = _connection(handler)
        connection._handlers[one_way.LandSaved.KIND] = (one_way.LandSaved, handler)
        frames: list[m.IssueTicket | one_way.LandSaved] = [
            m.IssueTicket(1),
            one_way.LandSaved(2, 0, b""),
            one_way.LandSaved(3, 0, b""),
            m.IssueTicket(4),
            one_way.LandSaved(5, 0, b""),
            m.IssueTicket(6),
        ]
        connection.data_received(b"".join(m.encode(frame, number) for number, frame in enumerate(frames, 1)))
        await _turns(2)
        assert served == [1, 2, 3, 4, 5, 6]
        assert [(kind, sequence) for kind, sequence, _ in transport.answers] == [(m.Done.KIND, n) for n in (1, 4, 6)]
        times = connection._times.verbs()["land_saved"]
        assert (sum(times.counts), times.refused, times.failed) == (3, 1, 1)

    asyncio.run(run())


def test_a_connection_that_ends_before_its_answer_begins_leaves_nothing_waiting() -> None:
    async def never_begun() -> object:
        raise AssertionError("it has begun")

    async def run() -> None:
        connection, transport = _connection(lambda _: never_begun())
        connection.data_received(_requests(0, 1))
        connection.connection_lost(None)
        await _turns(3)
        assert transport.answers == []

    asyncio.run(run())


def test_after_a_bad_frame_the_rest_is_read_but_not_served() -> None:
    async def run() -> None:
        connection, transport = _connection(lambda _: m.Done())
        connection.data_received(_requests(0, 2) + m.encode(m.AskStats(), 7) + _requests(2, 2))
        connection.data_received(_requests(4, 2))
        await _turns(3)
        assert [kind for kind, _, _ in transport.answers] == [m.Done.KIND, m.Done.KIND, m.Failure.KIND]
        assert transport.reads
        assert transport.has_ended

    asyncio.run(run())


def test_running_out_of_memory_in_a_request_ends_the_daemon() -> None:
    def handler(request: m.IssueTicket) -> object:
        if request.lease == 1:
            raise MemoryError
        if request.lease == 2:
            raise ProtocolError("bad")
        return m.Done()

    async def run() -> None:
        failures: list[BaseException] = []
        connection, transport = _connection(handler, failures)
        connection.data_received(_requests(0, 3))
        assert [values[0] if values else "" for _, _, values in transport.answers] == ["", "internal", "protocol"]
        assert [type(error) for error in failures] == [MemoryError]

    asyncio.run(run())


class Answer:
    """No record: it has no frame."""


def test_a_connection_whose_request_raises_ends_alone_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        clock = HandClock()
        turns = Turns(clock)

        def slow(_: m.IssueTicket) -> object:
            return _spend(clock, TURN_NS)

        busy, _ = _connection(slow, clock=clock, turns=turns)
        bad, bad_transport = _connection(lambda _: Answer(), clock=clock, turns=turns)
        good, good_transport = _connection(lambda _: m.Done(), clock=clock, turns=turns)
        busy.data_received(_requests(1, 3))
        bad.data_received(_requests(1, 2))
        good.data_received(_requests(1, 2))
        assert (bad.is_waiting, good.is_waiting) == (True, True)
        await _turns(8)
        assert len(good_transport.answers) == 2, "who waits behind it is served"
        assert bad.state == "ending"
        kind, _, (code, text) = bad_transport.answers[-1]
        assert (kind, code) == (m.Failure.KIND, "internal")
        assert "AttributeError" in str(text)
        assert bad_transport.has_ended
        assert bad_transport.reads, "until the peer has closed it"
        assert [verb.failed for verb in bad._times.verbs().values() if verb.failed] == [1]

    asyncio.run(run())
    assert "request of kind" in caplog.text
    assert "AttributeError" in caplog.text


@pytest.mark.parametrize("sent", [None, 5])
def test_a_peer_that_cannot_be_passed_a_descriptor_keeps_its_slots_until_it_has_closed(
    sent: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be writing into slots meanwhile, which would be another one's the moment that the connection is closed here."""

    def send_fds(*_: object) -> int:
        if sent is None:
            raise OSError(errno.ETOOMANYREFS, "too many descriptors are on their way")
        return sent

    async def run() -> None:
        connection, transport = _connection(lambda _: AnswerWithDescriptor(m.Done(), 0))
        transport.socket = ours
        monkeypatch.setattr(socket, "send_fds", send_fds)
        connection.data_received(_requests(1, 2))
        assert connection.state == "ending"
        assert (transport.has_ended, transport.reads, transport.was_aborted) == (True, True, False)
        assert not transport.answers, "nothing behind what may be a part of an answer"

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(run())
    assert "connection 1 ends" in caplog.text


def test_a_connection_that_cannot_receive_the_error_keeps_its_slots_until_its_peer_has_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Transport):
        """A transport that takes nothing."""

        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise RuntimeError("nothing can be written")

    async def run() -> None:
        connection, _ = _connection(lambda _: m.Done())
        broken = Broken()
        connection.connection_made(broken)
        connection.data_received(_requests(1, 1))
        assert connection.state == "ending"
        assert (broken.has_ended, broken.reads, broken.was_aborted) == (True, True, False)

    asyncio.run(run())
    assert "connection 1 ends unanswered" in caplog.text


@pytest.mark.parametrize(
    ("error", "may_write"),
    [
        (None, True),  # closed from this side
        (OSError(errno.ENOMEM, "no memory to read into"), True),
        (ConnectionResetError(), False),
        (BrokenPipeError(), False),
    ],
)
@pytest.mark.parametrize("is_eof", [False, True])
@pytest.mark.parametrize("is_bad", [False, True], ids=["open", "after a bad frame"])
def test_only_a_peer_that_has_closed_is_known_to_write_no_more(
    error: Exception | None, may_write: bool, is_eof: bool, is_bad: bool
) -> None:
    closed: list[tuple[ConnectionId, bool]] = []

    async def run() -> None:
        connection, _ = connection_over(lambda _: m.Done(), HandClock(), on_closed=lambda *given: closed.append(given))
        if is_bad:
            connection.data_received(b"\xff" * 16)
            assert connection.state == "ending"
        if is_eof:
            assert not connection.eof_received()
        connection.connection_lost(error)

    asyncio.run(run())
    assert closed == [(ConnectionId(1), may_write and not is_eof)]


def test_a_peer_that_is_no_writer_writes_no_more_when_it_is_ended() -> None:
    closed: list[bool] = []

    async def run() -> None:
        connection, transport = connection_over(
            lambda _: m.Done(), HandClock(), on_closed=lambda _, may_write: closed.append(may_write)
        )
        connection.end_service("the test says so", is_writer=False)
        assert transport.was_aborted
        connection.connection_lost(None)

    asyncio.run(run())
    assert closed == [False]
