"""Layouts with summaries, head groups or a role between nodes: a node that cannot read such a layout is not asked."""

from dataclasses import replace

import pytest

from kvpool.index.remote_chunks import NodeName
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.peers.control import records as r
from kvpool.protocol.records import messages as m
from kvpool.types import ConnectionId
from tests.rigs.nodes.fleet import Node
from tests.rigs.tiers.tiered_pool import LAYOUT, key_of
from tests.unit.server.peers.test_two_nodes import run

KEY = key_of(7, 0)
SUMMARIZED = replace(LAYOUT, head_dim=32, kv_heads=1, dtype="float16", summaries="mean")
GROUPED = replace(LAYOUT, kv_heads=2, head_groups=2)


@pytest.mark.parametrize(
    ("version", "layout", "asked"),
    [
        (r.SUMMARIES_VERSION - 1, SUMMARIZED, 0),
        (r.SUMMARIES_VERSION, SUMMARIZED, 1),
        (r.SUMMARIES_VERSION - 1, replace(SUMMARIZED, summaries=""), 1),
        (r.HEAD_GROUPS_VERSION - 1, GROUPED, 0),
        (r.HEAD_GROUPS_VERSION, GROUPED, 1),
        (r.HEAD_GROUPS_VERSION - 1, replace(LAYOUT, group=GroupRole(WINDOW, 64, 0)), 0),
        (r.HEAD_GROUPS_VERSION, replace(LAYOUT, group=GroupRole(WINDOW, 64, 0)), 1),
    ],
)
def test_a_node_of_an_earlier_version_is_asked_for_no_layout_that_it_cannot_read(
    version: int, layout: object, asked: int
) -> None:
    async def act(here: Node, there: Node) -> None:
        here.believe(there, [KEY])
        link = here.links[NodeName(there.name)]
        assert link.life is not None
        link.life = replace(link.life, version=version)
        session = here.pool.pool.open_session(ConnectionId(11), "model", layout)  # type: ignore[arg-type]
        leased = await here.pool.serve(here.pool.pool.chains.acquire(session, m.Acquire(KEY)))
        assert leased.chunks <= 1
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        assert there.server.counts["pulls"] == asked
        assert there.server.counts["refused.protocol"] == 0
        here.pool.pool.drop_connection(session.connection)

    run(act)
