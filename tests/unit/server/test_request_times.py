"""Request times: a bucket for each bound, a row for each verb that a connection may ask, and none besides."""

import asyncio

import pytest

from kvpool.errors import Refused
from kvpool.protocol.records import messages as m
from kvpool.server.metrics.request_times import BOUNDS_NS, RequestTimes
from kvpool.server.service import VERBS
from tests.rigs.clock import HandClock
from tests.rigs.recording_transport import connection_over


def test_a_time_falls_into_the_first_bucket_that_holds_it() -> None:
    times = RequestTimes(VERBS)
    for taken_ns in (0, BOUNDS_NS[0], BOUNDS_NS[0] + 1, BOUNDS_NS[-1], BOUNDS_NS[-1] + 1):
        times.add_time(m.Acquire.KIND, taken_ns)
    counts = times.verbs()["acquire"].counts
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert times.verbs()["acquire"].sum_ns == 2 * BOUNDS_NS[0] + 1 + 2 * BOUNDS_NS[-1] + 1
    assert sum(times.verbs()["issue_ticket"].counts) == 0


def test_a_connection_measures_its_handlers_by_the_clock_it_is_given() -> None:
    times, clock = RequestTimes(VERBS), HandClock()

    def handler(_: m.IssueTicket) -> m.Done:
        clock.advance(30e-6)
        return m.Done()

    connection, _ = connection_over(handler, clock, times=times)
    connection.data_received(m.encode(m.IssueTicket(1), 1) * 2)
    tickets = times.verbs()["issue_ticket"]
    assert (tickets.sum_ns, sum(tickets.counts), tickets.refused, tickets.failed) == (60_000, 2, 0, 0)


def test_refusals_and_failures_are_counted_separately(caplog: pytest.LogCaptureFixture) -> None:
    times, clock = RequestTimes(VERBS), HandClock()
    errors: list[Exception] = [Refused("full", "no room"), ZeroDivisionError("oops")]

    def handler(_: m.IssueTicket) -> m.Done:
        raise errors.pop(0)

    connection, transport = connection_over(handler, clock, times=times)
    connection.data_received(m.encode(m.IssueTicket(1), 1) + m.encode(m.IssueTicket(2), 2))
    tickets = times.verbs()["issue_ticket"]
    assert (sum(tickets.counts), tickets.refused, tickets.failed) == (2, 1, 1)
    assert len(transport.answers) == 2
    assert "ZeroDivisionError" in caplog.text


def test_an_answer_that_waits_includes_its_wait() -> None:
    times, clock = RequestTimes(VERBS), HandClock()

    async def later(_: m.IssueTicket) -> m.Done:
        await asyncio.sleep(0)
        clock.advance(0.005)
        return m.Done()

    async def run() -> None:
        connection, transport = connection_over(later, clock, times=times)
        connection.data_received(m.encode(m.IssueTicket(1), 1))
        assert sum(times.verbs()["issue_ticket"].counts) == 0
        while not transport.written:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert times.verbs()["issue_ticket"].sum_ns == 5_000_000


def test_a_usage_report_is_measured_and_never_answered() -> None:
    times = RequestTimes(VERBS)
    connection, transport = connection_over(lambda _: None, HandClock(), times=times)
    connection.data_received(m.encode(m.Usage(b""), 0))
    assert sum(times.verbs()["usage"].counts) == 1
    assert transport.written == b""
