"""Refused handshakes in the log: a bounded number of lines."""

import logging

import pytest

from kvpool.server.connections.local_socket import Peer
from kvpool.server.connections.refusal_log import MINUTE_NS, PEERS_MAX, RefusalLog
from tests.rigs.clock import HandClock


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_one_peer_and_code_is_one_line_a_minute_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = HandClock(0)
    refusals = RefusalLog(clock)
    for _ in range(500):
        refusals.note_refusal(Peer(7, 1000, 1000), "version", "client speaks protocol 9")
    refusals.note_refusal(Peer(7, 1000, 1000), "layout", "too large")
    refusals.note_refusal(Peer(8, 1000, 1000), "version", "client speaks protocol 9")
    assert _lines(caplog) == [
        "handshake refused: pid 7 uid 1000: version: client speaks protocol 9",
        "handshake refused: pid 7 uid 1000: layout: too large",
        "handshake refused: pid 8 uid 1000: version: client speaks protocol 9",
    ]
    clock.ns = MINUTE_NS
    refusals.note_refusal(Peer(7, 1000, 1000), "version", "client speaks protocol 9")
    assert _lines(caplog) == [
        "handshake refused: pid 7 uid 1000: version: 499 times more",
        "handshake refused: pid 7 uid 1000: version: client speaks protocol 9",
    ]


def test_new_processes_without_end_are_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = HandClock(0)
    refusals = RefusalLog(clock)
    for pid in range(10_000):
        refusals.note_refusal(Peer(pid, 1000, 1000), "version", "client speaks protocol 9")
    assert len(_lines(caplog)) == PEERS_MAX + 1
    clock.ns = MINUTE_NS
    refusals.note_refusal(Peer(1, 1000, 1000), "version", "client speaks protocol 9")
    lines = _lines(caplog)
    assert lines[0] == f"handshakes of further peers refused: {10_000 - PEERS_MAX}"
    assert len(lines) == 2
