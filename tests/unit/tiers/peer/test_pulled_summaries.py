"""Layouts with summaries, head groups or a role between nodes."""

from dataclasses import replace

import pytest

from kvpool.ids import ConnectionId
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.protocol.records import messages as m
from tests.rigs.nodes.fleet import two_nodes
from tests.rigs.tiers.tiered_pool import LAYOUT, key_of

pytestmark = pytest.mark.asyncio
KEY = key_of(7, 0)
SUMMARIZED = replace(LAYOUT, head_dim=32, kv_heads=1, dtype="float16", summaries="mean")
GROUPED = replace(LAYOUT, kv_heads=2, head_groups=2)


@pytest.mark.parametrize(
    "layout", [SUMMARIZED, GROUPED, replace(LAYOUT, group=GroupRole(WINDOW, 64, 0))], ids=["summaries", "heads", "role"]
)
async def test_a_node_reads_the_layout_that_it_is_asked_for(layout: Layout) -> None:
    async with two_nodes() as (here, there):
        here.believe(there, [KEY])
        session = here.pool.pool.open_session(ConnectionId(11), "model", layout)
        leased = await here.pool.serve(here.pool.pool.chains.acquire(session, m.Acquire(KEY)))
        assert leased.chunks <= 1
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        assert there.server.counts["pulls"] == 1
        assert there.server.counts["refused.protocol"] == 0
        here.pool.pool.drop_connection(session.connection)
