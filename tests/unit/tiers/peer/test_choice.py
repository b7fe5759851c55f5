"""Tests of the choice between nodes: the one by which all chunks are here first."""

import pytest

from kvpool.index.remote_chunks import NodeName, RemoteRun
from kvpool.tiers.peer.choice import choose_run

# Of a chunk, and before the first one: seconds.
PACES = {"fast": (0.001, 0.001), "slow": (0.1, 0.001), "far": (0.001, 1.0)}


def cost_s(node: NodeName, chunks: int) -> float:
    chunk_s, wait_s = PACES[node]
    return wait_s + chunks * chunk_s


@pytest.mark.parametrize(
    ("runs", "first"),
    [
        ({}, None),
        ({"slow": 10}, "slow"),
        ({"slow": 10, "fast": 10}, "fast"),
        ({"slow": 20, "fast": 10}, "fast"),  # half of it comes fast, and the rest from the slow one
        ({"slow": 10, "fast": 40}, "fast"),  # all of it
        ({"far": 100, "fast": 1}, "far"),  # a detour by one chunk costs more than that chunk
        ({"far": 100, "slow": 20}, "far"),
        ({"far": 100, "slow": 20, "fast": 100}, "fast"),
        ({"slow": 400, "far": 200, "fast": 3}, "far"),
    ],
)
def test_the_one_by_which_all_of_it_is_here_first(runs: dict[str, int], first: str | None) -> None:
    chosen = choose_run([RemoteRun(NodeName(node), chunks) for node, chunks in runs.items()], cost_s)
    assert (None if chosen is None else chosen.node) == first
