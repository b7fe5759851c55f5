"""Tensor parallelism over two real ranks: each stores its shard, and a prefix is as long as every rank has it."""

import pytest

from tests.engines.vllm.conftest import StartEngine, chunks_in_dram, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

RANKS = 2


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


def _has_shards_of_all(daemon: Daemon, tokens: int) -> bool:
    chunks = chunks_in_dram(daemon)
    return chunks >= RANKS * tokens // CHUNK_TOKENS and chunks % RANKS == 0


def test_two_ranks_load_what_they_computed(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2000)
    computed = ranks.tokens(asked, 16)
    wait_until(lambda: _has_shards_of_all(module_daemon, loadable_tokens(asked)), "every rank has stored its shards")
    before = loaded_tokens(module_daemon)
    assert ranks.tokens(asked, 16) == computed
    wait_loaded(module_daemon, before + loadable_tokens(asked))
    shown = ranks.ask("counters")
    assert shown["kvpool_loaded_chunks"] >= RANKS * loadable_tokens(asked) // CHUNK_TOKENS
    assert not module_daemon.problems()


def test_bad_bytes_of_some_ranks_change_no_token(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2040)
    expected = chunks_in_dram(module_daemon) + RANKS * loadable_tokens(asked) // CHUNK_TOKENS
    computed = ranks.tokens(asked, 16)
    wait_until(lambda: chunks_in_dram(module_daemon) >= expected, "shards are stored")
    before = int(module_daemon.stats()["checksum_failures"])
    turn_bits(module_daemon)
    for _ in range(2):
        assert ranks.tokens(asked, 16) == computed
    wait_until(lambda: int(module_daemon.stats()["checksum_failures"]) > before, "the daemon has heard of bad chunks")
