"""Tests of what is logged about a node that does wrong with each pull: a line in a minute, and the number of the others."""

import logging

import pytest

from kvpool.log_pace import INTERVAL_S, LogPace
from kvpool.peers.control import records as r
from tests.rigs.clock import HandClock
from tests.rigs.nodes.fleet import two_nodes
from tests.rigs.tiers.tiered_pool import key_of

KEYS = [key_of(7, number) for number in range(20)]


def test_one_line_in_an_interval_names_the_number_of_those_left_out() -> None:
    clock = HandClock()
    pace = LogPace(clock)
    assert pace.take_line() == ""
    assert [pace.take_line() for _ in range(5)] == [None] * 5
    clock.advance(INTERVAL_S + 0.1)
    assert pace.take_line() == " (5 lines like it were left out)"
    assert pace.take_line() is None
    clock.advance(2 * INTERVAL_S)
    clock.advance(2 * INTERVAL_S)
    assert pace.take_line() == " (1 lines like it were left out)"


@pytest.mark.asyncio
async def test_a_node_that_refuses_every_pull_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvpool.tiers.peer"):
        async with two_nodes() as (here, there):
            there.offers.serve = lambda _puller, _pull, answer: answer(r.Refused(r.RefusalCode.FAILED, "no " * 100))  # type: ignore[method-assign,assignment]
            here.believe(there, KEYS)
            for _ in range(20):
                assert await here.pool.load(KEYS) == 0
            assert here.pool.pool.measure({}).tiers["peer"]["peer.failed_pulls_refused"] == 20
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("peer there was asked for")
