"""Engines with vLLM's own tiered offloading on a CPU (see `cpu_tiering`) and the pool as its secondary tier.

An engine's last blocks reach the tier in steps after its last token, which a server makes by itself and an engine in the test's
process in `settle`. A test can empty the region alone (`empty`): of a reset by vLLM the tier would begin an epoch.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Survivor, counted
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, Engine, tiering
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED, Geometry
from tests.rigs.daemon import Daemon, wait_until

TOKENS = 16
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 120.0
# Of the largest chunk that a test has.
TOKENS_OF_A_CHUNK = 2 * BLOCK_TOKENS


def pool_tier(socket: str, **settings: object) -> dict[str, object]:
    """The tier's configuration, as docs/engines/vllm.md has it."""
    return {
        "type": "KVPoolTier",
        "module_path": "kvpool_client.vllm.tier",
        "socket": socket,
        "timeout_s": TIMEOUT_S,
        "batch_timeout_s": 2 * TIMEOUT_S,
        **settings,
    }


def connected(engine: Engine, daemon: Daemon) -> Engine:
    """The engine, when its tier stores: weights are read in the background, and a request has the tier connect."""
    before = int(daemon.stats()["dram.chunks"])

    def has_stored() -> bool:
        engine.ask("generate", prompts=[prompt(time.monotonic_ns() % (1 << 30), TOKENS_OF_A_CHUNK + 1)], tokens=4)
        return int(daemon.stats()["dram.chunks"]) > before

    wait_until(has_stored, "the tier has stored a chunk", CONNECT_TIMEOUT_S)
    return engine


def whole_chunks(asked: list[list[int]]) -> int:
    """Chunks of one block each."""
    return sum(len(ids) // BLOCK_TOKENS for ids in asked)


def answers(engine: Engine, asked: list[list[int]], count: int = TOKENS) -> list[list[int]]:
    """Greedy tokens, of KV that is neither in the engine's own prefix cache nor in its region: computed, or from the tier."""
    empty(engine)
    return answers_with_region(engine, asked, count)


def answers_with_region(engine: Engine, asked: list[list[int]], count: int = TOKENS) -> list[list[int]]:
    """Greedy tokens, of KV that is not in the engine's own prefix cache; what its region has, it loads from there."""
    tokens = engine.tokens(asked, count)
    settle(engine)
    return tokens


def empty(engine: Engine) -> None:
    """Empty the engine's prefix cache and its region."""
    assert engine.ask("lose_region")["done"]


def settle(engine: Engine) -> None:
    """Until every job of requests that have ended has ended."""
    assert engine.ask("settle")["settled"], engine.log()[-3000:]


def loaded(engine: Engine) -> int:
    """Chunks that the engine has loaded through the tier so far."""
    return counted(engine, "loaded_chunks")


def hit_tokens(engine: Engine) -> int:
    """Tokens that the engine has taken from its region so far, most of them loaded by the tier."""
    return int(engine.ask("counters")["external_prefix_cache_hits"])


def wait_kept(daemon: Daemon, chunks: int) -> None:
    """Until so many chunks are in DRAM."""
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) >= chunks, f"{chunks} chunks are stored")


@pytest.fixture(scope="session")
def tiered(model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """An engine that outlives many daemons at one socket, and was started while there was none."""
    directory = tmp_path_factory.mktemp("daemons")
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    transfer = tiering(pool_tier(str(directory / "kvpool.sock")))
    with Engine(model(GROUPED), GROUPED, log, transfer=transfer) as engine:
        yield Survivor(engine, directory)
