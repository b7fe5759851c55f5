"""The server's side of following, over real sockets: one request of a connection, beside its pulls, with a deadline."""

import asyncio

import pytest

from kvpool.errors import PeerUnreachable, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control.link import LinkSettings
from kvpool.peers.control.server import ControlServerSettings
from kvpool.peers.link_state import LinkState
from tests.rigs.nodes.peers import KeyOwner, Owner, fast, fleet, identity_of, pull_of, until

pytestmark = pytest.mark.asyncio

CHANGES = r.Changes(3, 3, False, bytes(32), b"", 0)
LINK = LinkSettings(waiting_max=2, connect_s=5.0, ping_s=10.0)


async def test_changes_and_pages_are_answered() -> None:
    page = r.Keys(bytes(64), 3, r.NO_MORE_KEYS)
    keys = KeyOwner(reply=lambda ask: CHANGES if isinstance(ask, r.AskChanges) else page)
    with fleet() as nodes:
        server = nodes.serve(Owner(), follows=keys)
        link = await nodes.watch().ready(server)
        assert await link.request(r.AskKeys(0), 5.0) == page
        assert await link.request(r.AskChanges(2, 1000, 0), 5.0) == CHANGES
        assert [ask for _, ask, _ in keys.asked] == [r.AskKeys(0), r.AskChanges(2, 1000, 0)]
        assert keys.asked[0][0].node == "puller"
        assert server.stats()["follows"] == 2


async def test_a_request_that_waits_takes_no_pulls_place_and_pulls_take_none_of_it() -> None:
    owner, keys = Owner(is_slow=True), KeyOwner()
    with fleet() as nodes:
        server = nodes.serve(owner, follows=keys, settings=fast(ControlServerSettings(), waiting_max=2))
        link = await nodes.watch(link=LINK).ready(server)
        follow = link.request(r.AskChanges(2, 20_000, 0), 30.0)
        pulls = [link.request(pull_of(number), 10.0) for number in (1, 2)]
        await until(lambda: len(owner.pulls) == 2 and keys.asked, "all of them wait at the owner")
        with pytest.raises(PeerUnreachable, match="without an answer"):
            await link.request(r.AskKeys(0), 5.0)
        follow.cancel()
        await until(lambda: "2 waiting" in repr(link), "the link has given it up, and the owner has not")
        with pytest.raises(Refused, match="waits for its answer already") as refusal:
            await link.request(r.AskKeys(0), 5.0)
        assert refusal.value.code == r.RefusalCode.BUSY
        assert keys.asked[0][2](CHANGES)
        page = r.Keys(b"", 3, r.NO_MORE_KEYS)
        keys.reply = lambda ask: page
        assert await link.request(r.AskKeys(0), 5.0) == page
        assert link.state is LinkState.READY
        for one in pulls:
            one.cancel()


async def test_the_end_of_a_connection_ends_its_request() -> None:
    keys = KeyOwner()
    with fleet() as nodes:
        server = nodes.serve(Owner(), follows=keys)
        link = await nodes.watch().ready(server)
        asked = asyncio.ensure_future(link.request(r.AskChanges(1, 20_000, 0), 25.0))
        await until(lambda: keys.asked, "the request has come")
        await nodes.watch(node=identity_of("puller", 1)).ready(server)  # it connects again
        await until(lambda: keys.forgotten, "the former connection is forgotten")
        assert not keys.asked[0][2](CHANGES)
        asked.cancel()
