"""Followers over real sockets: snapshot and changes, gaps, lives and lost links, kept hints, full queues."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from kvpool.index import remote_chunks
from kvpool.index.remote_chunks import NodeName
from kvpool.key_column import KeyColumn
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from tests.rigs.nodes.following import QUICK, SLOW_RETRY, Book, Reader, column, serve
from tests.rigs.nodes.longest_run import longest_run
from tests.rigs.nodes.peers import Fleet, fleet, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def nodes() -> AsyncIterator[Fleet]:
    with fleet() as made:
        yield made


async def test_a_snapshot_and_then_every_change(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 1000))
    node = await reader.follow(serve(nodes, book))
    await reader.knows(node, column(0, 1000))
    await until(lambda: book.waiting, "it waits for changes")
    book.write(column(1000, 1010))
    await reader.knows(node, column(0, 1010))
    await until(lambda: book.waiting, "it waits again")
    book.write(column(0, 990), is_stored=False)
    await reader.knows(node, column(990, 1010))
    assert longest_run(reader.remote, column(990, 1010), 0) == (node, 20)
    counts = reader.followers.counts()[node]
    assert (counts.snapshots, counts.gaps, counts.failures, counts.lag, counts.last) == (1, 0, 0, 0, book.newest)
    assert reader.followers.stats() == {
        "followed": 1, "disconnected": 0, "snapshots": 1, "gaps": 0, "failures": 0, "lag": 0
    }  # fmt: skip


async def test_changes_between_the_pages_of_a_snapshot_are_not_lost(nodes: Fleet) -> None:
    book, reader = Book(page_keys=10), Reader(nodes)
    book.write(column(0, 50))
    removal, store = (column(0, 5), False), (column(60, 65), True)
    changes = [removal, store]
    honest = book.reply

    def reply(ask: r.AskFollow) -> r.FollowAnswer | r.Refused | None:
        answer = honest(ask)
        if isinstance(ask, r.AskKeys) and changes:
            keys, is_stored = changes.pop(0)
            book.write(keys, is_stored=is_stored)
        return answer

    book.reply = reply
    node = await reader.follow(serve(nodes, book))
    await until(lambda: book.waiting, "the snapshot has ended, and it waits for changes")
    await reader.knows(node, KeyColumn.of(book.chunks))
    for key in book.chunks:
        assert longest_run(reader.remote, KeyColumn.of([key]), 0).node == node


async def test_a_gap_is_another_snapshot(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 100))
    node = await reader.follow(serve(nodes, book))
    await reader.knows(node, column(0, 100))
    await until(lambda: book.waiting, "it waits for changes")
    book.events += [(column(0, 50), False), (column(0, 1), False)]
    book.lose_events()
    book.chunks -= set(column(0, 50))
    book.answer_all()
    await reader.knows(node, column(50, 100))
    counts = reader.followers.counts()[node]
    assert (counts.snapshots, counts.gaps) == (2, 1)
    await until(lambda: counts.last == book.newest, "it is up to date")


async def test_after_a_lost_link_it_goes_on_and_a_new_life_is_another_snapshot(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 100))
    server = serve(nodes, book)
    address = server.endpoints[0]
    node = await reader.follow(server)
    await reader.knows(node, column(0, 100))
    server.close()
    link = reader.watcher.link_named(address)
    await until(lambda: link.life is None, "the link is lost")
    assert reader.followers.known_of(node) == 100
    assert reader.followers.stats()["disconnected"] == 1
    book.waiting.clear()
    book.write(column(100, 110))
    server = serve(nodes, book, address=address)
    await reader.knows(node, column(0, 110), "after the link has come back")
    await until(lambda: reader.followers.counts()[node].snapshots == 1, "its end is read")
    server.close()
    other = Book()
    other.write(column(500, 520))
    serve(nodes, other, life=2, address=address)
    await reader.knows(node, column(500, 520), "in its new life")
    await until(lambda: reader.followers.counts()[node].snapshots == 2, "its end is read")
    assert longest_run(reader.remote, column(0, 1), 0).chunks == 0


async def test_hints_of_a_lost_node_are_kept_for_a_time_and_then_forgotten(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes, replace(QUICK, kept_s=0.02))
    book.write(column(0, 100))
    server = serve(nodes, book)
    node = await reader.follow(server)
    await reader.knows(node, column(0, 100))
    server.close()
    await reader.forgets(node)
    assert len(reader.remote) == 0
    serve(nodes, book, address=server.endpoints[0])
    await reader.knows(node, column(0, 100), "when it has come back")
    await until(lambda: reader.followers.counts()[node].snapshots == 2, "its end is read")
    reader.followers.forget(node)
    assert (len(reader.remote), reader.followers.counts()) == (0, {})
    assert reader.followers.stats()["snapshots"] == 2


async def test_a_full_queue_stops_the_reading_and_nothing_is_lost(
    nodes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_chunks, "PENDING_KEYS_MAX", 150)
    monkeypatch.setattr(remote_chunks, "KEYS_A_TURN", 7)
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 2000))
    node = await reader.follow(serve(nodes, book))
    await reader.knows(node, column(0, 2000))
    assert reader.followers.counts()[node].failures == 0


async def test_a_queue_that_is_never_worked_off_is_a_failure(nodes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_chunks, "PENDING_KEYS_MAX", 150)
    book, reader = Book(), Reader(nodes, replace(QUICK, answer_s=0.3, back_off=SLOW_RETRY))
    monkeypatch.setattr(reader.remote, "advance", lambda: False)
    book.write(column(0, 1000))
    node = await reader.follow(serve(nodes, book))
    await until(lambda: "had no room" in reader.followers.fault_of(node), "it has given up")


async def test_failures_in_a_row_wait_longer_and_hints_are_not_kept_for_ever(nodes: Fleet) -> None:
    reader = Reader(nodes, replace(QUICK, kept_s=0.05))
    book = Book()
    book.write(column(0, 10))
    node = await reader.follow(serve(nodes, book))
    await until(lambda: book.waiting, "it is followed")
    book.reply = lambda ask: r.Refused(r.RefusalCode.FAILED, "broken")
    waiting, book.waiting = book.waiting, []
    assert waiting[0][2](r.Refused(r.RefusalCode.FAILED, "broken"))
    await reader.forgets(node)
    honest = Book()
    honest.write(column(0, 20))
    book.reply = honest.reply
    await reader.knows(node, column(0, 20), "after it has recovered")
    assert reader.followers.counts()[node].failures > 2


async def test_a_bug_in_one_follower_is_logged_and_leaves_the_others(
    nodes: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, book = Reader(nodes), Book()
    book.write(column(0, 10))
    honest = await reader.follow(serve(nodes, book))
    await reader.knows(honest, column(0, 10))
    broken: Callable[[PeerLink], Any] = lambda link: 1 / 0  # noqa: E731  # a body of one expression
    monkeypatch.setattr("kvpool.peers.following.follower.Follower._take_snapshot", lambda self, link: broken(link))
    node = await reader.follow(serve(nodes, Book(), "other"))
    await until(lambda: "ZeroDivisionError" in reader.followers.fault_of(node), "it is noted")
    assert [one for one in caplog.records if one.exc_info]
    await until(lambda: book.waiting, "the first one is followed")
    book.write(column(10, 20))
    await reader.knows(honest, column(0, 20))


async def test_of_two_links_to_a_node_one_is_followed_and_the_other_when_that_has_ended(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 10))
    first, second = serve(nodes, book), serve(nodes, book)
    node = await reader.follow(first)
    await reader.knows(node, column(0, 10))
    link = await reader.watcher.ready(second)
    follower = reader.followers._followers[node]
    assert follower.link is not link
    first.close()
    await until(lambda: follower.link is link, "the other link is followed")
    book.write(column(10, 20))
    await reader.knows(node, column(0, 20))
    assert reader.followers.stats()["snapshots"] == 1


async def test_a_member_that_takes_another_name_leaves_no_hints_behind(nodes: Fleet) -> None:
    book, reader = Book(), Reader(nodes)
    book.write(column(0, 10))
    server = serve(nodes, book)
    node = await reader.follow(server)
    await reader.knows(node, column(0, 10))
    server.close()
    serve(nodes, book, "renamed", address=server.endpoints[0])
    await reader.knows(NodeName("renamed"), column(0, 10))
    assert list(reader.followers.counts()) == ["renamed"]
    assert len(reader.remote) == 10
