"""Tests of what is logged of links, and of what health says of those that operators have to mend."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import cast

import pytest

from kvpool.peers.control.identity import PeerLife
from kvpool.peers.control.link import WRONG_KEYS, PeerLink
from kvpool.peers.members.member import Member
from kvpool.server.peers.link_log import LINES_AT_ONCE, LinkLog, stream_problems
from kvpool.tiers.peer.node_records import NodeRecords
from tests.e2e.remote.test_fleet_faults import rows_of_page
from tests.rigs.clock import HandClock


class Link(PeerLink):
    """A link that connects to nothing."""

    def __init__(self, fault: str = "", same_faults: int = 1) -> None:
        self.member = Member("tcp://192.0.2.12:9470")
        self.life = self.last_life = None
        self.fault, self.same_faults = fault, same_faults


@pytest.mark.parametrize(
    ("fault", "symptom"),
    [
        (WRONG_KEYS, "a wrong key"),
        ("refused: domain: the nodes belong to different trust domains: give both the same", "another trust domain"),
        ("refused: version: peer speaks versions 1 to 2, this node 3 to 4: update the puller", "another version"),
        ("refused: name: another node that calls itself 'gpu-1' is connected", "this node's name is taken"),
        ("it cannot be connected: nobody listens there", ""),
        ("no answer to a ping", ""),
        ("refused: busy: too many nodes are connected", ""),
    ],
)
def test_what_operators_have_to_mend_is_a_problem_from_the_second_time_on(fault: str, symptom: str) -> None:
    assert LinkLog.problems([Link(fault, 1)]) == []
    problems = LinkLog.problems([Link(fault, 2)])
    assert len(problems) == bool(symptom)
    if symptom:
        shown = rows_of_page()[symptom].replace("ADDRESS", "192.0.2.12:9470").replace("NODE", "'gpu-1'")
        assert problems[0].startswith(shown.partition("…")[0].rstrip())


def test_problems_are_bounded() -> None:
    problems = LinkLog.problems([Link(WRONG_KEYS, 2) for _ in range(30)])
    assert (len(problems), problems[-1]) == (9, "peers: 22 more nodes cannot be used")


class Loop:
    """An event loop whose timers a test ends."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def call_later(self, _delay_s: float, call: Callable[[], None]) -> object:
        self.timers.append(call)
        return call


def test_each_change_is_logged_and_of_a_link_that_comes_and_goes_a_few_and_the_latest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, link, loop = HandClock(), Link(), Loop()
    links = LinkLog(clock, cast(asyncio.AbstractEventLoop, loop))
    with caplog.at_level(logging.INFO, "kvpool.server.peers"):
        for change in range(101):
            clock.advance(0.01)
            link.life = None if change % 2 else PeerLife("gpu-1", bytes(16), "", is_new=False)
            link.fault = "the connection ended" if change % 2 else ""
            links.note_link(link)
            links.note_link(link)
        lines = [record.getMessage() for record in caplog.records]
        assert lines[:2] == ["peer 192.0.2.12:9470: is connected", "peer 192.0.2.12:9470: the connection ended"]
        assert len(lines) == LINES_AT_ONCE
        (catch_up,) = loop.timers
        catch_up()
        assert caplog.records[-1].getMessage().startswith("peer 192.0.2.12:9470: is connected (")
        assert len(caplog.records) == LINES_AT_ONCE + 1


def test_a_stream_port_that_nothing_passes_names_its_address() -> None:
    records = NodeRecords(HandClock(), random.Random(1))
    records.of("well")
    records.of("gpu-2").unreachable = "tcp://192.0.2.12:9471"
    (problem,) = stream_problems(records.all())
    shown = rows_of_page()["a blocked stream port"].replace("NODE", "gpu-2").replace("ADDRESS", "192.0.2.12:9471")
    assert problem.startswith(shown)
