"""The vLLM connector and chunks of other nodes: pulled ones are loaded and not saved, others computed and saved here."""

from collections.abc import Iterator

import pytest

from kvpool.key_column import KeyColumn
from tests.rigs.nodes.remote_daemon import RemoteDaemon
from tests.rigs.nodes.two_nodes import PeerDaemon, pulled_chunks, two_nodes, wait_known
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, keys_of, prompt

TOKENS = prompt(1, 5 * CHUNK + 1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteDaemon]:
    """For all tests: each has weights of its own."""
    with RemoteDaemon(tmp_path_factory.mktemp("remote")) as started:
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PeerDaemon, PeerDaemon]]:
    """Likewise."""
    with two_nodes(tmp_path_factory.mktemp("pair")) as nodes:
        yield nodes


def packed_keys(engine: ScriptedEngine) -> KeyColumn:
    keys = keys_of(engine, TOKENS)
    return KeyColumn.of(keys[number] for number in range(len(keys)))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_stale_hints_are_computed_and_saved(start: StartEngine, daemon: RemoteDaemon, load: str) -> None:
    engine = start(kvpool__load=load, weights=f"stale {load}")
    daemon.announce(packed_keys(engine))
    assert (
        engine.scheduler._scheduler.pool.lookup(
            engine.scheduler._scheduler.pool.keys_from_hashes(Request("keys", TOKENS).block_hashes, BLOCK, salt=b"")
        ).tiers.tolist()
        == [3] * 5
    )
    assert ask(engine, "cold", TOKENS).external == 0
    engine.forget()
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK


def test_chunks_of_both_nodes_are_loaded_and_computed(start: StartEngine, daemon: RemoteDaemon) -> None:
    engine = start(weights="both")
    keys = packed_keys(engine)
    assert ask(engine, "first", TOKENS[: 2 * CHUNK + 1]).external == 0
    daemon.announce(keys)
    engine.forget()
    assert ask(engine, "second", TOKENS).external == 2 * CHUNK
    engine.forget()
    assert ask(engine, "third", TOKENS).external == 5 * CHUNK


def test_a_request_that_names_a_node_which_nobody_knows_is_computed(start: StartEngine, daemon: RemoteDaemon) -> None:
    engine = start(weights="named")
    named = {"kv_transfer_params": {"owner": "nobody"}}
    assert ask(engine, "cold", TOKENS, **named).external == 0
    engine.forget()
    assert ask(engine, "warm", TOKENS, **named).external == 5 * CHUNK


@pytest.mark.parametrize(("load", "ranks"), [("async", 1), ("sync", 2)])
def test_chunks_that_were_pulled_are_loaded_and_not_saved_again(
    start: StartEngine, pair: tuple[PeerDaemon, PeerDaemon], load: str, ranks: int
) -> None:
    here = pair[1]
    owner, engine = (
        start(kvpool__load=load, ranks=ranks, socket=node.socket, weights=f"pulled {load}") for node in pair
    )
    known, pulled = int(here.stats()["peer.known_chunks"]), pulled_chunks(here)
    assert ask(engine, "first", TOKENS[: 2 * CHUNK + 1]).external == 0
    assert ask(owner, "there", TOKENS).external in (0, 2 * CHUNK)
    wait_known(here, known + 5 * ranks)
    assert ask(engine, "warm", TOKENS).external == 5 * CHUNK
    assert pulled_chunks(here) - pulled == 3 * ranks
    asked = {name: counted(engine, name) for name in ("saved_chunks", "present_chunks")}
    assert asked == {"saved_chunks": 2 * ranks, "present_chunks": 0}
