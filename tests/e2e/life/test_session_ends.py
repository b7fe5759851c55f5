"""Ends of a client's session and its return: the log's lines about them, and the patience with a daemon that greets late."""

import logging
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.connection import link
from kvpool_client.connection.session import Session
from tests.rigs.daemon import SMALL, Daemon, wait_connected, wait_until
from tests.rigs.greeter import Greeter
from tests.rigs.payload import tokens_of

LOGGER = "kvpool_client.connection.session_log"
TIMEOUT_S = 0.05
# Longer than a request's time, and much shorter than the link's thread waits.
LATE_S = 20 * TIMEOUT_S
JOIN_S = 120.0


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_a_daemon_that_ends_and_comes_back_is_two_lines_in_the_clients_log(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with daemon.connect() as pool:
        assert pool.connected
        daemon.kill()
        wait_until(lambda: len(lines_of(caplog)) == 1, "the end is logged")
        assert repr(pool).startswith("<Pool test-model away: ")
        daemon.start()
        wait_connected(pool)
        wait_until(lambda: len(lines_of(caplog)) == 2, "the return is logged")
    assert len(lines_of(caplog)) == 2, "the Pool's own end is none of the daemon's"
    ended, back = lines_of(caplog)
    assert ended == (
        f"kvpool: the connection to the daemon at {daemon.socket} has ended: the daemon closed it; "
        "nothing is loaded or saved until it is back"
    )
    assert back.startswith(f"kvpool: connected to the daemon at {daemon.socket}, after ")
    assert repr(pool) == "<Pool test-model closed>"


def test_a_first_connection_that_fails_is_one_warning_and_the_pool_has_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "nobody.sock")
    with kv.connect(path, model="m", layout=SMALL) as pool, closing(pool.open_promise_line(1)):
        reason = f"no daemon answers at {path}: [Errno 2] No such file or directory"
        assert repr(pool) == f"<Pool m away: {reason}>"
        (record,) = [record for record in caplog.records if record.name == LOGGER]
        assert record.levelname == "WARNING"
        assert reason in record.getMessage()
        assert "start kvpoold there" in record.getMessage()
    assert repr(pool) == "<Pool m closed>"


@pytest.mark.parametrize("kind", ["file", "directory", "fifo"])
def test_what_is_no_socket_is_called_that(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
    with kv.connect(path, model="m", layout=SMALL) as pool:
        assert repr(pool) == f"<Pool m away: no daemon answers at {path}: it is no socket>"


def test_a_pool_that_lost_its_daemon_has_the_reason_of_the_last_attempt(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        wait_connected(pool)
        assert repr(pool) == "<Pool test-model connected>"
        daemon.kill()
        wait_until(lambda: "Connection refused" in repr(pool), "a further attempt has failed")
        assert (
            repr(pool)
            == f"<Pool test-model away: no daemon answers at {daemon.socket}: [Errno 111] Connection refused>"
        )


def test_the_line_names_the_request_that_was_not_answered(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with daemon.connect(timeout_s=5.0) as pool:
        wait_connected(pool)
        keys = pool.keys(tokens_of(1, 2 * SMALL.chunk_tokens))
        daemon.signal(signal.SIGSTOP)
        try:
            assert pool.announce(keys).announced == 0
            wait_until(lambda: len(lines_of(caplog)) > 0, "the end is logged")
        finally:
            daemon.signal(signal.SIGCONT)
    assert "has ended: no answer to Announce: " in lines_of(caplog)[0]


def test_a_daemon_that_greets_later_than_a_request_may_take_is_reached(daemon: Daemon, tmp_path: Path) -> None:
    is_over = threading.Event()
    with (
        Greeter(tmp_path, daemon, before=lambda: is_over.wait(LATE_S)) as late,
        kv.connect(late.path, model="test-model", layout=SMALL, timeout_s=TIMEOUT_S) as pool,
    ):
        wait_until(lambda: pool.connected, "it is reached")
        is_over.set()


def test_a_pool_is_closed_while_it_waits_for_a_welcome(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def noted(*arguments: Any, **named: Any) -> Session:
        if named["welcome_s"] == link.WELCOME_S:
            waits.set()
        return Session(*arguments, **named)

    monkeypatch.setattr(link, "WELCOME_S", 3600.0)
    monkeypatch.setattr(link, "Session", noted)
    daemon.signal(signal.SIGSTOP)
    try:
        pool = daemon.connect(timeout_s=TIMEOUT_S)
        assert waits.wait(JOIN_S)
        closing = threading.Thread(target=pool.close)
        closing.start()
        closing.join(JOIN_S)
        assert not closing.is_alive()
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_pool_waits_for_its_daemon_as_long_as_it_is_asked_to(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        assert pool.wait_connected(0.0)
        daemon.kill()
        wait_until(lambda: not pool.connected, "the end is known")
        assert not pool.wait_connected(0.0)
        assert not pool.wait_connected(0.01)
        found: list[bool] = []
        waiting = [threading.Thread(target=lambda: found.append(pool.wait_connected(JOIN_S))) for _ in range(3)]
        for one in waiting:
            one.start()
        daemon.start()
        for one in waiting:
            one.join()
        assert found == [True] * 3
        assert pool.connected


def test_nobody_waits_for_the_daemon_of_a_closed_pool_or_in_a_forked_child(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        daemon.kill()
        wait_until(lambda: not pool.connected, "the end is known")
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(pool.wait_connected(JOIN_S)))
        waiting.start()
        child = os.fork()
        if child == 0:
            os._exit(0 if pool.wait_connected(JOIN_S) is False else 1)
        assert os.waitpid(child, 0)[1] == 0
    waiting.join()
    assert found == [False], "the close has ended the wait"
    assert not pool.wait_connected()
