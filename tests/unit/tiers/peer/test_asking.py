"""Turns of pulls at one node: never more without an answer than it takes, in the order of connections."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest

from kvpool.clock import NS_PER_S, Clock, MonotonicClock
from kvpool.errors import PeerUnreachable
from kvpool.ids import ConnectionId
from kvpool.peers.asking import AT_ONCE, NAMED_WAITING_MAX, PULLS, SHARE, Asking, Turns
from kvpool.peers.control.link import PeerLink
from kvpool.tiers.remote import Asker
from tests.rigs.nodes.peers import TICKET, pull_of

REQUESTS = 3 * AT_ONCE
# Of engines that have a turn each.
ASKERS = [Asker(ConnectionId(1 + number)) for number in range(REQUESTS)]


@dataclass
class Owner:
    """In a link's place: it counts what waits, and answers at once, or lets requests time out."""

    is_silent: bool = False
    waiting: int = 0
    waiting_most: int = 0
    asked: list[int] = field(default_factory=list)
    member: Any = field(default_factory=lambda: type("Member", (), {"endpoint": "tcp://192.0.2.1:1"}))

    def request(self, request: Any, timeout_s: float) -> "asyncio.Future[Any]":
        self.asked.append(request.pull)
        self.waiting += 1
        self.waiting_most = max(self.waiting_most, self.waiting)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(timeout_s if self.is_silent else 0.0, self._end, answer, request.pull)
        return answer

    def _end(self, answer: "asyncio.Future[Any]", pull: int) -> None:
        self.waiting -= 1
        if self.is_silent:
            answer.set_exception(PeerUnreachable("silence"))
        else:
            answer.set_result((pull, TICKET))


async def _ask_all(owner: Owner, answer_s: float, turns: Turns = PULLS, clock: Clock | None = None) -> list[Any]:
    asking = Asking(clock or MonotonicClock(), turns)
    link = cast(PeerLink, owner)
    calls = [
        asking.ask_node(link, "one", partial(pull_of, number), answer_s, asker=asker)
        for number, asker in enumerate(ASKERS)
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_pulls_beyond_the_nodes_bound_wait_for_their_turn() -> None:
    owner = Owner()
    answers = asyncio.run(_ask_all(owner, 30.0))
    assert [answer[0] for answer in answers] == list(range(REQUESTS))
    assert owner.waiting_most <= AT_ONCE


def test_a_silent_node_is_asked_once_for_each_turn_and_no_more() -> None:
    """The time to answer has passed for all when the first are not answered: whoever gets their turns does not ask."""
    owner = Owner(is_silent=True)

    class PassingClock:
        def now_ns(self) -> int:
            return (owner.waiting < len(owner.asked)) * NS_PER_S

    turns = Turns(AT_ONCE, AT_ONCE * 20, SHARE)
    answers = asyncio.run(_ask_all(owner, 0.05, turns, PassingClock()))
    assert all(isinstance(answer, PeerUnreachable) for answer in answers)
    assert owner.asked == list(range(AT_ONCE))


def test_a_node_is_forgotten_with_its_last_turn() -> None:
    async def run() -> str:
        asking, owner = Asking(MonotonicClock(), Turns(AT_ONCE, 10_000)), Owner()
        for number in range(100):  # a hostile one shows another name with each connection
            await asking.ask_node(cast(PeerLink, owner), f"name {number}", partial(pull_of, number), 5.0)
        while repr(asking) != "<Asking 0 nodes>":
            await asyncio.sleep(0.001)
        return repr(asking)

    assert asyncio.run(asyncio.wait_for(run(), 20.0)) == "<Asking 0 nodes>"


def test_a_cancelled_pull_gives_its_turn_back() -> None:
    async def run() -> Any:
        asking, owner = Asking(MonotonicClock()), Owner(is_silent=True)
        link = cast(PeerLink, owner)
        tasks = [
            asyncio.ensure_future(asking.ask_node(link, "one", partial(pull_of, number), 30.0, asker=asker))
            for number, asker in enumerate(ASKERS)
        ]
        while owner.waiting < AT_ONCE:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        owner.is_silent = False
        return await asking.ask_node(link, "one", partial(pull_of, 99), 30.0)

    assert asyncio.run(run())[0] == 99


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_do_not_wait_for_each_other(nodes: int) -> None:
    async def run() -> int:
        asking, owner = Asking(MonotonicClock()), Owner(is_silent=True)
        link = cast(PeerLink, owner)
        tasks = [
            asyncio.ensure_future(asking.ask_node(link, f"node-{number}", partial(pull_of, 1), 30.0, asker=asker))
            for number in range(nodes)
            for asker in ASKERS
        ]
        while owner.waiting < nodes * AT_ONCE:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return owner.waiting_most

    assert asyncio.run(run()) == nodes * AT_ONCE


def test_a_connection_that_asks_without_end_leaves_others_their_turns_at_once() -> None:
    async def run() -> tuple[int, list[int]]:
        asking, owner = Asking(MonotonicClock()), Owner(is_silent=True)
        link, greedy, other = cast(PeerLink, owner), Asker(ConnectionId(1)), Asker(ConnectionId(2))
        tasks = [
            asyncio.ensure_future(asking.ask_node(link, "one", partial(pull_of, number), 30.0, asker=greedy))
            for number in range(REQUESTS)
        ]
        while owner.waiting < int(SHARE * AT_ONCE):
            await asyncio.sleep(0)
        alone = owner.waiting
        tasks.append(asyncio.ensure_future(asking.ask_node(link, "one", partial(pull_of, 99), 30.0, asker=other)))
        while 99 not in owner.asked:
            await asyncio.sleep(0)
        before = list(owner.asked)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return alone, before

    alone, before = asyncio.run(run())
    assert alone == int(SHARE * AT_ONCE)
    assert before == [*range(alone), 99], "it waits for nobody"


def test_connections_take_turns_however_many_pulls_each_has() -> None:
    async def run() -> list[int]:
        asking, owner = Asking(MonotonicClock()), Owner()
        link = cast(PeerLink, owner)
        greedy = [
            asking.ask_node(link, "one", partial(pull_of, number), 30.0, asker=ASKERS[number % 6])
            for number in range(4 * REQUESTS)
        ]
        last = asking.ask_node(link, "one", partial(pull_of, 9999), 30.0, asker=ASKERS[7])
        await asyncio.gather(*greedy, last)
        return owner.asked

    asked = asyncio.run(run())
    assert asked.index(9999) <= 2 * AT_ONCE, "within one round of the connections"


def test_few_requests_of_a_connection_that_name_a_node_wait_there() -> None:
    asking = Asking(MonotonicClock())
    requests = [Asker(ConnectionId(1), "one") for _ in range(NAMED_WAITING_MAX + 1)]
    for request in requests[:-1]:
        assert not asking.is_crowded("one", request)
        asking.enter("one", request)
        asking.enter("one", request)  # the next part of its chain
    assert asking.is_crowded("one", requests[-1])
    assert not asking.is_crowded("one", requests[0]), "its further parts are no further request"
    assert not asking.is_crowded("two", requests[-1])
    assert not asking.is_crowded("one", Asker(ConnectionId(2), "one"))
    asking.leave("one", requests[0])
    assert asking.is_crowded("one", requests[-1])
    asking.leave("one", requests[0])
    assert not asking.is_crowded("one", requests[-1])
