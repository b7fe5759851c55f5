"""Turns of pulls at one node: never more without an answer than it takes, and none at a node that has been silent too long."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvpool.clock import MonotonicClock
from kvpool.errors import PeerUnreachable
from kvpool.peers.asking import AT_ONCE, Asking
from kvpool.peers.control.link import PeerLink
from tests.rigs.nodes.peers import TICKET, pull_of

PULLS = 3 * AT_ONCE


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


async def _ask_all(owner: Owner, answer_s: float) -> list[Any]:
    asking = Asking(MonotonicClock())
    calls = [asking.ask(cast(PeerLink, owner), "one", pull_of(number), answer_s) for number in range(PULLS)]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_pulls_beyond_the_nodes_bound_wait_for_their_turn() -> None:
    owner = Owner()
    answers = asyncio.run(_ask_all(owner, 30.0))
    assert [answer[0] for answer in answers] == list(range(PULLS))
    assert owner.waiting_most <= AT_ONCE


def test_a_silent_node_is_asked_once_for_each_turn_and_no_more() -> None:
    owner = Owner(is_silent=True)
    answers = asyncio.run(_ask_all(owner, 0.05))
    assert all(isinstance(answer, PeerUnreachable) for answer in answers)
    assert owner.asked == list(range(AT_ONCE))


def test_a_cancelled_pull_gives_its_turn_back() -> None:
    async def run() -> Any:
        asking, owner = Asking(MonotonicClock()), Owner(is_silent=True)
        link = cast(PeerLink, owner)
        tasks = [asyncio.ensure_future(asking.ask(link, "one", pull_of(number), 30.0)) for number in range(PULLS)]
        while owner.waiting < AT_ONCE:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        owner.is_silent = False
        return await asking.ask(link, "one", pull_of(99), 30.0)

    assert asyncio.run(run())[0] == 99


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_do_not_wait_for_each_other(nodes: int) -> None:
    async def run() -> int:
        asking, owner = Asking(MonotonicClock()), Owner(is_silent=True)
        link = cast(PeerLink, owner)
        names = [f"node-{number}" for number in range(nodes) for _ in range(PULLS)]
        tasks = [asyncio.ensure_future(asking.ask(link, name, pull_of(1), 30.0)) for name in names]
        while owner.waiting < nodes * AT_ONCE:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return owner.waiting_most

    assert asyncio.run(run()) == nodes * AT_ONCE
