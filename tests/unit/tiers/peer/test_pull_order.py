"""Pulls of several engines from one node: turns are not in the order of requests, and the node refuses none of them."""

import asyncio

from kvpool.ids import ConnectionId
from kvpool.peers.asking import AT_ONCE
from kvpool.protocol.records import messages as m
from tests.rigs.nodes.fleet import Node
from tests.rigs.tiers.tiered_pool import LAYOUT, key_of

# Of the first engine: more than have a turn at once. The second one's come in between.
PAGES = 2 * AT_ONCE
ENGINES = (ConnectionId(11), ConnectionId(12))


def test_pulls_that_wait_for_their_turn_behind_other_engines_are_not_refused() -> None:
    async def live() -> None:
        here, there = Node("here", 96), Node("there", 96)
        await there.start()
        await here.start()
        await here.join(there)
        pages = [[key_of(engine, page) for page in range(PAGES)] for engine in ENGINES]
        for key in [key for of_engine in pages for key in of_engine]:
            assert await there.pool.save([key]) == 1
            here.believe(there, [key])
        sessions = [here.pool.pool.open_session(engine, "model", LAYOUT) for engine in ENGINES]
        for session, keys in zip(sessions, pages, strict=True):
            for key in keys:
                leased = await here.pool.serve(here.pool.pool.chains.acquire(session, m.Acquire(key)))
                assert leased.chunks == 1
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        stats = here.pool.pool.measure({}).tiers["peer"]
        assert (stats["peer.pulled_chunks"], stats["peer.failed_pulls_refused"]) == (2 * PAGES, 0)
        assert there.server.counts["refused.repeated"] == 0
        for session in sessions:
            here.pool.pool.drop_connection(session.connection)
        await here.stop()
        await there.stop()

    asyncio.run(live())
