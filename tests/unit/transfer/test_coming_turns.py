"""Turns of chunks that are on their way to the node that is asked: one at a time, in order, and none is lost."""

import asyncio

import pytest

from kvpool.transfer.coming_turns import ComingTurns

LONG_S = 60.0


@pytest.mark.asyncio
async def test_one_has_the_turn_of_a_node_and_the_next_waits() -> None:
    turns = ComingTurns()
    assert await turns.take_turn("one", LONG_S)
    assert await turns.take_turn("other", LONG_S), "another node's"
    waiting = [asyncio.ensure_future(turns.take_turn("one", LONG_S)) for _ in range(2)]
    await asyncio.sleep(0)
    for number, turn in enumerate(waiting):
        assert not turn.done()
        turns.end_turn("one")
        assert await turn, number
    turns.end_turn("one")
    assert await turns.take_turn("one", LONG_S)


@pytest.mark.asyncio
async def test_who_waits_too_long_or_no_more_leaves_the_turn_to_the_next() -> None:
    turns = ComingTurns()
    assert await turns.take_turn("one", LONG_S)
    assert not await turns.take_turn("one", 0.001)
    gone, granted, last = (asyncio.ensure_future(turns.take_turn("one", LONG_S)) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    turns.end_turn("one")
    granted.cancel()  # it has the turn, and does not know
    await asyncio.wait([granted])
    assert await last
    turns.end_turn("one")
    assert repr(turns) == "<ComingTurns at 0 nodes>"
