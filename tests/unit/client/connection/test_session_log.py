"""Lines about a Pool's sessions: an end and the next begin, and few of a daemon that ends again and again."""

import logging

import pytest

from kvpool_client.connection.session_log import PAUSE_S, SessionLog
from tests.rigs.clock import HandClock

ENDED = "kvpool: the connection to the daemon at /run/s has ended: {}; nothing is loaded or saved until it is back{}"
BACK = "kvpool: connected to the daemon at /run/s, after {} s without one"
ABSENT = (
    "kvpool: not connected: no daemon answers at /run/s: [Errno 2] No such file or directory; nothing is loaded or saved until "
    "a daemon serves /run/s: start kvpoold there, and this connects by itself, or name another socket (path of connect, or "
    "KVPOOL_SOCKET)"
)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def sessions(clock: HandClock) -> SessionLog:
    return SessionLog("/run/s", clock)


def test_an_end_and_the_next_begin_are_a_line_each(
    sessions: SessionLog, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.note_begun()
    assert caplog.messages == [], "nothing had ended"
    for _ in range(20):
        sessions.note_away("it hung up")
        clock.advance(0.1)
    sessions.note_begun()
    sessions.note_begun()
    assert caplog.messages == [ENDED.format("it hung up", ""), BACK.format("2.0")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_daemon_that_ends_again_and_again_has_a_pair_of_lines_in_a_minute(
    sessions: SessionLog, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4 * int(PAUSE_S)):
        sessions.note_away("late")
        clock.advance(0.25)
        sessions.note_begun()
        clock.advance(0.25)
    more = f" ({2 * int(PAUSE_S) - 1} more since the last such line)"
    assert caplog.messages == [
        ENDED.format("late", ""),
        BACK.format("0.2"),
        ENDED.format("late", more),
        BACK.format("0.2"),
    ]


def test_an_end_soon_after_another_one_is_logged_later_where_the_daemon_stays_away(
    sessions: SessionLog, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.note_away("first")
    sessions.note_begun()
    clock.advance(1.0)
    sessions.note_away("second")
    assert len(caplog.messages) == 2
    clock.advance(PAUSE_S)
    sessions.note_away("second")
    sessions.note_away("second")
    sessions.note_begun()
    assert caplog.messages[2:] == [ENDED.format("second", ""), BACK.format("60.0")]


def test_a_first_connection_that_fails_is_a_warning_with_reason_and_cure_and_a_late_one_a_line(
    sessions: SessionLog, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.note_absent("no daemon answers at /run/s: [Errno 2] No such file or directory")
    clock.advance(3.0)
    sessions.note_begun()
    assert caplog.messages == [ABSENT, BACK.format("3.0")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_first_connection_that_is_refused_is_one_warning(
    sessions: SessionLog, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.note_refused("too old")
    sessions.note_absent("too old")
    assert caplog.messages == ["kvpool: the daemon at /run/s refuses this connection: too old"]


def test_a_refusal_is_a_line_until_there_is_a_session_or_another_reason(
    sessions: SessionLog, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    sessions.note_absent("nobody is there")
    for reason in ["too old", "too old", "full", "full"]:
        sessions.note_refused(reason)
    sessions.note_begun()
    sessions.note_refused("full")
    refused = "kvpool: the daemon at /run/s refuses this connection: "
    assert [line for line in caplog.messages if line.startswith(refused)] == [
        refused + "too old",
        refused + "full",
        refused + "full",
    ]
