"""Tensor parallelism over two real ranks: each stores its shard, and a prefix is as long as every rank has it."""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, chunks_in_dram, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, SINGLE, Geometry
from tests.rigs.daemon import Daemon, wait_until

RANKS = 2
STORED_TIMEOUT_S = 120.0


@pytest.fixture(scope="module", params=["async", "sync"])
def ranks(request: pytest.FixtureRequest, start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    with module_daemon.admin() as admin:
        admin.flush(None, None)
    return start_engine(
        GROUPED,
        socket=module_daemon.socket,
        settings={"kvpool.load": request.param},
        in_process=False,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )


def _tokens_with_all_stored(ranks: Engine, daemon: Daemon, asked: list[list[int]]) -> list[list[int]]:
    """The prompts' tokens; every rank has stored its shards. Saves that are late are declined: the next pass makes them."""
    with daemon.admin() as admin:
        admin.flush(None, None)
    computed = ranks.tokens(asked, 16)

    def has_shards_of_all() -> bool:
        chunks = chunks_in_dram(daemon)
        if chunks >= RANKS * loadable_tokens(asked) // CHUNK_TOKENS and chunks % RANKS == 0:
            return True
        assert ranks.tokens(asked, 16) == computed
        return False

    wait_until(has_shards_of_all, "every rank has stored its shards", STORED_TIMEOUT_S)
    return computed


def test_two_ranks_load_what_they_computed(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2000)
    computed = _tokens_with_all_stored(ranks, module_daemon, asked)
    before = loaded_tokens(module_daemon)
    assert ranks.tokens(asked, 16) == computed
    wait_loaded(module_daemon, before + loadable_tokens(asked))
    shown = ranks.ask("counters")
    assert shown["kvpool_loaded_chunks"] >= RANKS * loadable_tokens(asked) // CHUNK_TOKENS
    assert not module_daemon.problems()


def test_bad_bytes_of_some_ranks_change_no_token(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2040)
    computed = _tokens_with_all_stored(ranks, module_daemon, asked)
    before = int(module_daemon.stats()["checksum_failures"])
    turn_bits(module_daemon)
    for _ in range(2):
        assert ranks.tokens(asked, 16) == computed
    wait_until(lambda: int(module_daemon.stats()["checksum_failures"]) > before, "the daemon has heard of bad chunks")


def test_a_head_that_every_rank_has_is_stored_once(
    start_engine: StartEngine, plain: Callable[[Geometry], Engine], module_daemon: Daemon
) -> None:
    """vLLM does not show that ranks have the same KV head: it follows from the model's configuration."""
    asked = prompts(first=2080)
    expected = plain(SINGLE).tokens(asked, 16)
    with module_daemon.admin() as admin:
        admin.flush(None, None)
    engine = start_engine(
        SINGLE,
        socket=module_daemon.socket,
        in_process=False,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )
    assert engine.tokens(asked, 16) == expected
    chunks = loadable_tokens(asked) // CHUNK_TOKENS
    wait_until(lambda: chunks_in_dram(module_daemon) >= chunks, "its chunks are stored", STORED_TIMEOUT_S)
    before = loaded_tokens(module_daemon)
    assert engine.tokens(asked, 16) == expected
    wait_loaded(module_daemon, before + loadable_tokens(asked))
    assert chunks_in_dram(module_daemon) < RANKS * chunks
    assert not module_daemon.problems()
