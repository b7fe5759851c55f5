"""Engines on two nodes, each on its own daemon: what one engine has saved is a hit of the other; a node that fails costs time.

The tokens are always those of an engine without a pool.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import wait_until
from tests.rigs.nodes.two_nodes import PeerDaemon, pulled_chunks, two_nodes, wait_known

TOKENS = 16
# How long an engine waits for a load that does not come, and what a busy machine adds.
FAILED_PULL_S, SLACK_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its daemon, and the engine on it."""

    daemon: PeerDaemon
    engine: Engine

    def stored_chunks(self) -> int:
        """Chunks that were ever stored by its engine."""
        return int(self.daemon.stats()["saved_chunks"])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, start_engine: StartEngine) -> Iterator[tuple[Node, Node]]:
    options = {"dram.capacity": "256MiB"}
    with two_nodes(tmp_path_factory.mktemp("nodes"), may_have_spaces=True, **options) as daemons:
        one, other = (Node(daemon, start_engine(GROUPED, socket=daemon.socket)) for daemon in daemons)
        yield one, other


def _save(node: Node, other: Node, asked: list[list[int]], expected: list[list[int]], pulled: int = 0) -> None:
    """Have one node's engine compute prompts but for `pulled` chunks, until the other node knows of every chunk."""
    before, known = node.stored_chunks(), int(other.daemon.stats()["peer.known_chunks"])
    chunks = sum(len(ids) // CHUNK_TOKENS for ids in asked)
    assert node.engine.tokens(asked, TOKENS) == expected
    wait_until(lambda: node.stored_chunks() - before >= chunks - pulled, "the chunks are stored")
    wait_known(other.daemon, known + chunks)


def test_a_prefix_saved_on_one_node_is_a_hit_on_the_other(
    nodes: tuple[Node, Node], plain: Plain, report: Callable[[str], None]
) -> None:
    for number, (here, there) in enumerate((nodes, nodes[::-1])):
        asked = prompts(first=2300 + 20 * number)
        expected = plain(GROUPED).tokens(asked, TOKENS)
        _save(there, here, asked, expected)
        loaded, stored, present = (
            loaded_tokens(here.daemon),
            here.stored_chunks(),
            counted(here.engine, "present_chunks"),
        )
        assert here.engine.tokens(asked, TOKENS) == expected
        wait_loaded(here.daemon, loaded + loadable_tokens(asked))
        shown, pulled = here.engine.ask("counters"), pulled_chunks(here.daemon)
        report(f"{pulled} chunks were pulled, {shown['kvpool_hit_tokens/peer']:.0f} tokens were hits")
        assert pulled * CHUNK_TOKENS >= loadable_tokens(asked)
        assert shown["kvpool_hit_tokens/peer"] == shown["prompt_tokens_cached_by_source/p2p"] >= loadable_tokens(asked)
        assert counted(here.engine, "present_chunks") == present, "what was pulled is not offered again"
        assert here.stored_chunks() - stored <= len(asked), "at most the last chunk of each prompt was computed"
        assert here.engine.tokens(asked, TOKENS) == expected
        assert pulled_chunks(here.daemon) == pulled, "what was pulled is this node's own"
        assert not here.daemon.problems()


def test_a_prompt_whose_beginning_is_here_and_rest_there_is_loaded_from_both(
    nodes: tuple[Node, Node], plain: Plain
) -> None:
    here, there = nodes
    whole = prompt(2360, 700)
    begin = whole[: 4 * CHUNK_TOKENS + 1]
    _save(here, there, [begin], plain(GROUPED).tokens([begin], TOKENS))
    expected = plain(GROUPED).tokens([whole], TOKENS)
    before = pulled_chunks(there.daemon)
    _save(there, here, [whole], expected, pulled=4)
    assert pulled_chunks(there.daemon) - before == 4, "the beginning came from the other node"
    pulled = pulled_chunks(here.daemon)
    assert here.engine.tokens([whole], TOKENS) == expected
    assert pulled_chunks(here.daemon) - pulled == 700 // CHUNK_TOKENS - 4


def test_bytes_that_changed_on_the_other_node_are_computed(nodes: tuple[Node, Node], plain: Plain) -> None:
    here, there = nodes
    asked = prompts(first=2380)
    expected = plain(GROUPED).tokens(asked, TOKENS)
    _save(there, here, asked, expected)
    turn_bits(there.daemon)
    for _ in range(2):
        assert here.engine.tokens(asked, TOKENS) == expected
    assert int(here.daemon.stats()["peer.failed_chunks"]) > 0
    with there.daemon.admin() as admin:
        admin.flush(None, None)


def test_a_node_that_hangs_or_dies_costs_a_bounded_wait(
    nodes: tuple[Node, Node], plain: Plain, report: Callable[[str], None]
) -> None:
    here, there = nodes
    asked = [prompt(2400 + number, 700) for number in range(4)]
    expected = plain(GROUPED).tokens(asked, TOKENS)
    _save(there, here, asked, expected)
    assert here.engine.tokens(asked[:1], TOKENS) == expected[:1]
    seconds = {}
    for number, (what, act) in enumerate({"hangs": signal.SIGSTOP, "dies": signal.SIGKILL}.items(), 1):
        there.daemon.signal(act)
        started = time.perf_counter()
        assert here.engine.tokens([asked[number]], TOKENS) == [expected[number]]
        seconds[what] = time.perf_counter() - started
        there.daemon.signal(signal.SIGCONT)
    started = time.perf_counter()
    assert here.engine.tokens([asked[3]], TOKENS) == [expected[3]], "a prompt that was nobody's here is computed"
    computed_s = time.perf_counter() - started
    report(
        f"{seconds['hangs']:.1f} s with a node that hangs, {seconds['dies']:.1f} s as it dies, {computed_s:.1f} s later"
    )
    assert seconds["hangs"] < computed_s + FAILED_PULL_S + SLACK_S
    there.daemon.start()
    assert there.engine.tokens(asked, TOKENS) == expected
    assert here.engine.tokens(asked, TOKENS) == expected
    assert not here.daemon.problems()
    assert not there.daemon.problems()
