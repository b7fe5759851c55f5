"""The vLLM connector over two nodes: what an engine of one has stored, an engine of the other loads, of any kind of
model, and also where a request alone names the node."""

from collections.abc import Iterator

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.vllm.model import STATE
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, prompt

PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK * CHUNK


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """For all tests: each has a model of its own."""
    with two_daemons(tmp_path_factory.mktemp("pair")) as daemons:
        yield daemons


@pytest.mark.parametrize("windows", [(0,), (0, 12, 12), (STATE, 0), (STATE, 12, 0)], ids=str)
def test_what_one_node_has_is_loaded_on_the_other(
    windows: tuple[int, ...], start: StartEngine, pair: tuple[Daemon, Daemon]
) -> None:
    owner, here = pair
    there, engine = (start(windows=windows, socket=node.socket) for node in pair)
    before, pulled = int(owner.stats()["dram.chunks"]), int(here.stats()["peer.pulled_chunks"])
    ask(there, "cold", prompt(1, PROMPT))
    stored = int(owner.stats()["dram.chunks"])
    wait_until(lambda: int(here.stats()["peer.known_chunks"]) == stored, "the other node's chunks are known")
    assert ask(engine, "warm", prompt(1, PROMPT)).offers == [WHOLE]
    assert int(here.stats()["peer.pulled_chunks"]) - pulled == stored - before
    pulled = int(here.stats()["peer.pulled_chunks"])
    assert engine.recomputed == 0
    assert ask(engine, "again", prompt(1, PROMPT)).offers == [WHOLE]
    assert int(here.stats()["peer.pulled_chunks"]) == pulled, "it has them now"


@pytest.mark.slow
def test_what_the_named_node_has_is_loaded_and_what_it_lacks_is_computed(
    start: StartEngine, pair: tuple[Daemon, Daemon]
) -> None:
    owner, here = pair
    wait_until(lambda: here.stats()["peer.links.ready"] == 1, "the nodes are connected")
    prefill, decode = (start(socket=node.socket, weights="named") for node in pair)
    before, read = int(owner.stats()["dram.chunks"]), int(here.stats()["peer.read_bytes"])
    assert ask(prefill, "prefill", prompt(1, 5 * CHUNK + 1)).external == 0
    wait_until(lambda: int(owner.stats()["dram.chunks"]) == before + 5, "the prompt is stored")
    named = {"kv_transfer_params": {"owner": "owner"}}
    decoded = ask(decode, "decode", prompt(1, 5 * CHUNK + 1), **named)
    peers = {name: count for name, count in here.stats().items() if name.startswith("peer.") and count}
    assert decoded.external == 5 * CHUNK, f"offers {decoded.offers}, at the second node {peers}"
    assert int(here.stats()["peer.read_bytes"]) > read
    other = prompt(2, 3 * CHUNK + 1)
    assert ask(decode, "unknown there", other, **named).external == 0
    assert ask(decode, "saved here now", other, **named).external == 3 * CHUNK
