"""Engines of different tensor-parallel sizes and pipeline stages that share chunks through the vLLM connector."""

from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, prompt, start_engine

__all__ = ["start_engine"]
pytestmark = pytest.mark.torch

HEADS = 4
TOKENS = prompt(1, 5 * CHUNK + 3)
# Ranks, those of them that hold the same KV, layers of each stage.
SIZES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"ranks": 2},
    "four": {"ranks": 4},
    "eight": {"ranks": 8, "replicas": 2},
    "stages": {"stages": (2, 1)},
    "two-by-stages": {"ranks": 2, "stages": (1, 2)},
}
# A size that stores, and those that read it: each size once of both, in the long form all with all.
RING: list[tuple[str, list[str]]] = [
    ("one", ["eight"]),
    ("two", ["stages"]),
    ("four", ["two"]),
    ("eight", ["one"]),
    ("stages", ["two-by-stages"]),
    ("two-by-stages", ["four"]),
]
LONG = [pytest.param(size, list(SIZES), marks=pytest.mark.slow) for size in SIZES]
REQUESTS = 3


def joint(start: StartEngine, size: str, **more: Any) -> Any:
    return start(heads=HEADS, kvpool__head_groups=HEADS, **SIZES[size], **more)


@pytest.mark.parametrize(("writer", "readers"), [*RING, *LONG], ids=str)
def test_every_size_reads_what_another_one_has_stored(
    writer: str, readers: list[str], start_engine: StartEngine, daemon: Daemon
) -> None:
    assert ask(joint(start_engine, writer), "cold", TOKENS).external == 0
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == 5, "every chunk is whole, and stored once")
    for reader in readers:
        engine = joint(start_engine, reader)
        assert ask(engine, reader, TOKENS).external == 5 * CHUNK, reader
        assert counted(engine, "saved_chunks") == 0
    assert int(daemon.stats()["dram.chunks"]) == 5
    assert not daemon.problems()


@pytest.mark.parametrize("size", ["two", "eight", "two-by-stages"])
def test_many_prompts_of_an_engine_in_parts_are_stored_and_loaded_whole(size: str, start_engine: StartEngine) -> None:
    engine = joint(start_engine, size, blocks=160)
    for name in ("cold", "warm"):
        requests = [
            Request(f"{name} {number}", prompt(number, 4 * CHUNK + number), new_tokens=3)
            for number in range(1, 1 + REQUESTS)
        ]
        engine.run(*requests)
        engine.forget()
    assert [request.external for request in requests] == [4 * CHUNK] * REQUESTS


def test_engines_without_head_groups_share_with_their_own_size_alone(start_engine: StartEngine) -> None:
    ask(joint(start_engine, "two"), "cold", TOKENS)
    assert ask(start_engine(heads=HEADS, ranks=2), "apart", TOKENS).external == 0
    assert ask(start_engine(heads=HEADS, ranks=2, kvpool__head_groups=2), "fewer groups", TOKENS).external == 0


@pytest.mark.parametrize(("size", "groups"), [("two", 3), ("two", 1), ("four", 2), ("one", 6)], ids=str)
def test_head_groups_that_ranks_or_heads_cannot_be_divided_for_are_refused(
    size: str, groups: int, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(heads=HEADS, kvpool__head_groups=groups, **SIZES[size])
    assert ask(engine, "cold", TOKENS).external == 0
    assert f"kvpool.head_groups is {groups}, expected a divisor of 4 KV heads" in caplog.text


def test_more_groups_than_heads_are_a_group_for_each_head(start_engine: StartEngine) -> None:
    """As of a model whose other layers have more heads."""
    ask(joint(start_engine, "two"), "cold", TOKENS)
    more = start_engine(heads=HEADS, kvpool__head_groups=2 * HEADS, **SIZES["four"])
    assert ask(more, "of eight groups", TOKENS).external == 5 * CHUNK


def test_the_layout_in_which_a_heads_bytes_are_in_a_row_is_asked_for() -> None:
    from kvpool_client.vllm.connector import ConnectorCalls
    from tests.rigs.vllm.config import config_of

    ask_for = ConnectorCalls.get_required_kvcache_layout
    assert ask_for(config_of("/x", kvpool__head_groups=4)) == "LBHNC"
    assert ask_for(config_of("/x")) is None
