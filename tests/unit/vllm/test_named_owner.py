"""The vLLM connector and a request that names the node of its prompt: what that node has is loaded, and the rest computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, prompt, start_engine  # noqa: E402 - only where torch is

__all__ = ["start_engine"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TOKENS = prompt(1, 5 * CHUNK + 1)
NODES: list[Daemon] = []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """The second node of two."""
    with two_daemons(tmp_path) as (owner, here):
        NODES[:] = [owner]
        wait_until(lambda: here.stats()["peer.links.ready"] == 1, "the nodes are connected")
        yield here


def test_what_the_named_node_has_is_loaded_and_what_it_lacks_is_computed(
    start_engine: StartEngine, daemon: Daemon
) -> None:
    prefill, decode = start_engine(socket=NODES[0].socket), start_engine()
    assert ask(prefill, "prefill", TOKENS).external == 0
    wait_until(lambda: NODES[0].stats()["dram.chunks"] == 5, "the prompt is stored")
    named = {"kv_transfer_params": {"owner": "owner"}}
    decoded = ask(decode, "decode", TOKENS, **named)
    peers = {name: count for name, count in daemon.stats().items() if name.startswith("peer.") and count}
    assert decoded.external == 5 * CHUNK, f"offers {decoded.offers}, at the second node {peers}"
    assert daemon.stats()["peer.read_bytes"] > 0
    other = prompt(2, 3 * CHUNK + 1)
    assert ask(decode, "unknown there", other, **named).external == 0
    decode.forget()
    assert ask(decode, "saved here now", other, **named).external == 3 * CHUNK
