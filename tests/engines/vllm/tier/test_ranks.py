"""Tensor parallelism: a row of the region has the shards of all ranks, and a chunk of the pool is a row."""

from tests.engines.vllm.conftest import StartEngine, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, Engine, tiering
from tests.engines.vllm.rigs.prompts import prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import TOKENS, connected, hit_tokens, pool_tier, wait_kept, whole_chunks
from tests.rigs.daemon import Daemon


def test_two_ranks_load_the_rows_that_they_stored(start_engine: StartEngine, module_daemon: Daemon) -> None:
    """Each time by engines of their own, for nothing empties the region of one in several processes."""

    def start() -> Engine:
        engine = start_engine(
            GROUPED,
            transfer=tiering(pool_tier(module_daemon.socket)),
            in_process=False,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        return connected(engine, module_daemon)

    engine = start()
    asked, before = prompts(first=5950), int(module_daemon.stats()["dram.chunks"])
    chunks = whole_chunks(asked)
    computed = engine.tokens(asked, TOKENS)
    wait_kept(module_daemon, before + chunks)
    assert int(module_daemon.stats()["dram.chunks"]) == before + chunks, "one chunk for the shards of both"
    engine.close()
    engine = start()
    known = loaded_tokens(module_daemon)
    assert engine.tokens(asked, TOKENS) == computed
    assert hit_tokens(engine) == chunks * BLOCK_TOKENS
    wait_loaded(module_daemon, known + chunks * BLOCK_TOKENS)
    engine.close()
    turn_bits(module_daemon)
    engine = start()
    assert engine.tokens(asked, TOKENS) == computed
    assert not module_daemon.problems(deep=False)
