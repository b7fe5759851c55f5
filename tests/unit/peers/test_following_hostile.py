"""Peers that report falsely or without end: the following of them ends with a back-off, and nobody else's is affected."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvpool.clock import MonotonicClock
from kvpool.index.remote_chunks import NodeName
from kvpool.peers.control import records as r
from tests.rigs.nodes.following import QUICK, SLOW_RETRY, Book, Reader, column, serve
from tests.rigs.nodes.longest_run import longest_run
from tests.rigs.nodes.peers import LINK, Fleet, KeyOwner, fleet, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def nodes() -> AsyncIterator[Fleet]:
    with fleet() as made:
        yield made


def _gaps_for_ever(ask: r.AskFollow) -> r.FollowAnswer:
    if isinstance(ask, r.AskKeys):
        return r.Keys(column(0, 10).packed, 5, r.NO_MORE_KEYS)
    return r.Changes(9, 9, True, b"", b"", 0)


def _endless(ask: r.AskFollow) -> r.FollowAnswer:
    if isinstance(ask, r.AskKeys):
        return r.Keys(column(ask.cursor * 10, ask.cursor * 10 + 10).packed, 5, ask.cursor + 1)
    return r.Changes(5, 5, False, b"", b"", 0)


def _same_page(ask: r.AskFollow) -> r.FollowAnswer:
    return r.Keys(b"", 5, ask.cursor) if isinstance(ask, r.AskKeys) else r.Changes(5, 5, False, b"", b"", 0)


def _future_page(ask: r.AskFollow) -> r.FollowAnswer:
    if isinstance(ask, r.AskKeys):
        return r.Keys(b"", 1 << 60 if ask.cursor else 5, 1)
    return r.Changes(ask.last, 1 << 60, False, b"", b"", 0)


def _never_waits(ask: r.AskFollow) -> r.FollowAnswer:
    if isinstance(ask, r.AskKeys):
        return r.Keys(column(0, 10).packed, 5, r.NO_MORE_KEYS)
    return r.Changes(ask.last, ask.last, False, b"", b"", 0)


def _goes_back(ask: r.AskFollow) -> r.FollowAnswer:
    if isinstance(ask, r.AskKeys):
        return r.Keys(b"", 5, r.NO_MORE_KEYS)
    return r.Changes(3, 9, False, column(0, 1).packed, b"", 0)


def _odd_keys(ask: r.AskFollow) -> r.FollowAnswer:
    return r.Keys(bytes(33), 5, r.NO_MORE_KEYS)


def _answers_something_else(ask: r.AskFollow) -> r.FollowAnswer:
    return r.Changes(5, 5, False, b"", b"", 0)


def _refuses(ask: r.AskFollow) -> r.Refused:
    return r.Refused(r.RefusalCode.BUSY, "not today")


# What an honest node never answers, and the fault that it is.
FALSE = {
    "no longer has the events": _gaps_for_ever,
    "had no end within": _endless,
    "had no end within ": _same_page,
    "and none after 5": _future_page,
    "does not wait for any": _never_waits,
    "not today": _refuses,
}
# What no record can have, or is no answer to the request: it ends the link.
BAD = {
    "or a later one": _goes_back,
    "multiples of 32": _odd_keys,
    "Changes answers AskKeys": _answers_something_else,
}


@pytest.mark.parametrize("text", [*FALSE, *BAD], ids=lambda text: (FALSE | BAD)[text].__name__)
async def test_false_answers_end_the_following_of_that_peer_and_of_nobody_else(nodes: Fleet, text: str) -> None:
    settings = replace(QUICK, back_off=SLOW_RETRY)
    reader = Reader(nodes, settings, link=replace(LINK, back_off=SLOW_RETRY))
    book, liar = Book(), KeyOwner(reply=(FALSE | BAD)[text])
    book.write(column(5000, 5040))
    honest = await reader.follow(serve(nodes, book))
    await reader.knows(honest, column(5000, 5040))
    node = NodeName("liar")
    if "no end" in text:  # of this peer alone: no bound is short enough for it and long enough for an honest one
        reader.followers._settings = replace(settings, snapshot_s=0.05)
    link = reader.watcher.link_to(serve(nodes, liar, node))
    await until(lambda: text.strip() in reader.followers.fault_of(node), f"a fault: {text}")
    asked = len(liar.asked)
    await until(lambda: book.waiting, "the honest one is followed")
    book.write(column(5040, 5050))
    await reader.knows(honest, column(5000, 5050))
    assert len(liar.asked) == asked, "the next attempt waits"
    assert reader.followers.counts()[honest].failures == 0
    assert reader.followers.counts()[node].failures == (text in FALSE)
    assert (link.life is not None) == (text in FALSE)


async def test_who_announces_without_end_has_a_share_and_evicts_nobodys_hints(nodes: Fleet) -> None:
    reader = Reader(nodes, pairs=2000)
    book = Book()
    book.write(column(50_000, 50_900))
    honest = await reader.follow(serve(nodes, book))
    await reader.knows(honest, column(50_000, 50_900))
    last = 0

    def flood(ask: r.AskFollow) -> r.FollowAnswer:
        nonlocal last
        if isinstance(ask, r.AskKeys):
            return r.Keys(b"", 0, r.NO_MORE_KEYS)
        last = ask.last + 1
        return r.Changes(last, last, False, column(100 * last, 100 * last + 100).packed, b"", 0)

    node = await reader.follow(serve(nodes, KeyOwner(reply=flood), "flood"))
    await until(lambda: last > 100, "it has announced five times the table")
    assert reader.followers.known_of(node) <= 1000
    assert reader.followers.known_of(honest) == 900
    assert longest_run(reader.remote, column(50_000, 50_900), 0) == (honest, 900)
    assert reader.remote.stats()["left_out_chunks"] > 8000


async def test_requests_are_paced_however_fast_a_peer_answers(nodes: Fleet) -> None:
    """A peer that has an event at any moment is asked at the rate of the settings, not at that of its answers."""
    reader = Reader(nodes, replace(QUICK, peer_asked_per_s=100.0))
    clock = MonotonicClock()
    asked: list[int] = []

    def chatter(ask: r.AskFollow) -> r.FollowAnswer:
        asked.append(clock.now_ns())
        if isinstance(ask, r.AskKeys):
            return r.Keys(b"", 0, r.NO_MORE_KEYS)
        return r.Changes(ask.last + 1, ask.last + 1, False, b"", b"", 0)

    await reader.follow(serve(nodes, KeyOwner(reply=chatter)))
    await until(lambda: len(asked) > 10, "some requests have come")
    assert asked[10] - asked[0] > 0.07e9
