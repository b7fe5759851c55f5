"""Hybrid models over two nodes: what an engine of one has stored, windows and states too, an engine of the other loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.hybrid_engine import STATE
from tests.rigs.vllm.setting import CHUNK, prompt

pytestmark = pytest.mark.torch
StartEngine = Callable[..., Any]
PROMPT = 9 * CHUNK + 3
WHOLE = PROMPT // CHUNK * CHUNK


@pytest.mark.parametrize("windows", [(0, 12, 12), (STATE, 0), (STATE, 12, 0)], ids=str)
def test_what_one_node_has_is_loaded_on_the_other(windows: tuple[int, ...], start: StartEngine, tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here):
        there, engine = (start(windows=windows, socket=node.socket) for node in (owner, here))
        there.ask("cold", prompt(1, PROMPT))
        stored = int(owner.stats()["dram.chunks"])
        wait_until(lambda: int(here.stats()["peer.known_chunks"]) == stored, "the other node's chunks are known")
        assert engine.ask("warm", prompt(1, PROMPT)).offers == [WHOLE]
        pulled = int(here.stats()["peer.pulled_chunks"])
        assert pulled == stored
        assert engine.failed == 0
        assert engine.ask("again", prompt(1, PROMPT)).offers == [WHOLE]
        assert int(here.stats()["peer.pulled_chunks"]) == pulled, "it has them now"
        for one in (there, engine):
            one.close()
