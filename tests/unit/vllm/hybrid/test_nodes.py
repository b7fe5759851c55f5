"""Hybrid models over two nodes: what an engine of one has stored, windows and states too, an engine of the other loads."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.hybrid_engine import STATE
from tests.rigs.vllm.setting import CHUNK, prompt

pytestmark = pytest.mark.torch
StartEngine = Callable[..., Any]
PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK * CHUNK


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """For all tests: each has a model of its own."""
    with two_daemons(tmp_path_factory.mktemp("pair")) as daemons:
        yield daemons


@pytest.mark.parametrize("windows", [(0, 12, 12), (STATE, 0), (STATE, 12, 0)], ids=str)
def test_what_one_node_has_is_loaded_on_the_other(
    windows: tuple[int, ...], start: StartEngine, pair: tuple[Daemon, Daemon]
) -> None:
    owner, here = pair
    there, engine = (start(windows=windows, socket=node.socket) for node in pair)
    before, pulled = int(owner.stats()["dram.chunks"]), int(here.stats()["peer.pulled_chunks"])
    there.ask("cold", prompt(1, PROMPT))
    stored = int(owner.stats()["dram.chunks"])
    wait_until(lambda: int(here.stats()["peer.known_chunks"]) == stored, "the other node's chunks are known")
    assert engine.ask("warm", prompt(1, PROMPT)).offers == [WHOLE]
    assert int(here.stats()["peer.pulled_chunks"]) - pulled == stored - before
    pulled = int(here.stats()["peer.pulled_chunks"])
    assert engine.failed == 0
    assert engine.ask("again", prompt(1, PROMPT)).offers == [WHOLE]
    assert int(here.stats()["peer.pulled_chunks"]) == pulled, "it has them now"
