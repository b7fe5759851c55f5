"""Chunks that only another node has are loaded through the tier; a node whose bytes changed, or that dies, changes no token."""

from collections.abc import Iterator

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import Engine, tiering
from tests.engines.vllm.rigs.prompts import prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import TOKENS, answers, connected, loaded, pool_tier, whole_chunks
from tests.rigs.nodes.two_nodes import PeerDaemon, pulled_chunks, two_nodes, wait_known

Node = tuple[PeerDaemon, Engine]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, start_engine: StartEngine) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), may_have_spaces=True, **{"dram.capacity": "64MiB"}) as daemons:
        transfers = [tiering(pool_tier(daemon.socket)) for daemon in daemons]
        one, other = (
            (daemon, connected(start_engine(GROUPED, transfer=transfer), daemon))
            for daemon, transfer in zip(daemons, transfers, strict=True)
        )
        yield one, other


def _store(owner: Node, other: Node, asked: list[list[int]], expected: list[list[int]]) -> None:
    """Have one node's engine compute prompts, until the other node knows of every chunk."""
    known = int(other[0].stats()["peer.known_chunks"])
    assert answers(owner[1], asked) == expected
    wait_known(other[0], known + whole_chunks(asked))


def test_what_another_node_has_is_loaded(nodes: tuple[Node, Node], plain: Plain) -> None:
    (here, engine), there = nodes
    asked = prompts(first=5600)
    expected = plain(GROUPED).tokens(asked, TOKENS)
    _store(there, nodes[0], asked, expected)
    pulled = pulled_chunks(here)
    for number in range(2):
        before = loaded(engine)
        assert answers(engine, asked) == expected
        assert loaded(engine) - before == whole_chunks(asked)
        assert pulled_chunks(here) - pulled == whole_chunks(asked), f"once, round {number}"
    assert not here.problems()


def test_bytes_that_changed_there_and_a_node_that_dies_change_no_token(nodes: tuple[Node, Node], plain: Plain) -> None:
    (here, engine), there = nodes
    changed, lost = prompts(first=5620), prompts(first=5640)
    expected = plain(GROUPED).tokens(changed, TOKENS)
    _store(there, nodes[0], changed, expected)
    turn_bits(there[0])
    for _ in range(2):
        assert answers(engine, changed) == expected
    assert int(here.stats()["peer.failed_chunks"]) > 0
    expected = plain(GROUPED).tokens(lost, TOKENS)
    _store(there, nodes[0], lost, expected)
    there[0].kill()
    for _ in range(2):
        assert answers(engine, lost) == expected
    assert not here.problems()
