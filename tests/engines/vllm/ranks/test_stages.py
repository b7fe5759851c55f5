"""Pipeline parallelism over two real stages of unequal length: each stores its layers, and another engine loads them all.

vLLM's CPU backend runs stages of a model that it has compiled, whatever compiles it. With `enforce_eager` the second stage ends
the engine at its first request (`assert self.intermediate_tensors is not None`, in `sync_and_gather_intermediate_tensors` of
`v1/worker/gpu_model_runner.py`), with or without a connector: the buffer is made by the warm-up, which is left out then.
"""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, chunks_in_dram, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, HYBRID, Geometry
from tests.rigs.daemon import Daemon, wait_until

STAGES = 2
LAYERS = "3,1"
ASKED = prompts(first=2100)


@pytest.fixture(scope="module")
def start_stages(start_engine: StartEngine, module_daemon: Daemon) -> Callable[[], Engine]:
    """Starts engines of two stages, of three layers and one."""

    def start() -> Engine:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_PP_LAYER_PARTITION", LAYERS)
            return start_engine(
                GROUPED,
                socket=module_daemon.socket,
                settings={"kvpool.always_load": True, "kvpool.wait_s": 10.0, "kvpool.timeout_s": 10.0},
                in_process=False,
                pipeline_parallel_size=STAGES,
                distributed_executor_backend="mp",
                enforce_eager=False,
                compilation_config={"mode": 2, "backend": "eager"},
            )

    return start


@pytest.fixture(scope="module")
def stages(start_stages: Callable[[], Engine]) -> Engine:
    return start_stages()


def test_two_stages_load_what_they_computed(stages: Engine, module_daemon: Daemon) -> None:
    computed = stages.tokens(ASKED, 16)
    wait_until(
        lambda: chunks_in_dram(module_daemon) >= STAGES * loadable_tokens(ASKED) // CHUNK_TOKENS, "stages are stored"
    )
    assert chunks_in_dram(module_daemon) % STAGES == 0
    before = loaded_tokens(module_daemon)
    assert stages.tokens(ASKED, 16) == computed
    wait_loaded(module_daemon, before + loadable_tokens(ASKED))
    assert stages.ask("counters")["kvpool_loaded_chunks"] >= STAGES * loadable_tokens(ASKED) // CHUNK_TOKENS
    assert not module_daemon.problems()


def test_stages_generate_the_tokens_of_an_engine_without_a_pool(
    stages: Engine, plain: Callable[[Geometry], Engine], start_stages: Callable[[], Engine], module_daemon: Daemon
) -> None:
    """Computed by one engine, loaded by the next."""
    expected = plain(GROUPED).tokens(ASKED, 16)
    assert stages.tokens(ASKED, 16) == expected
    stages.close()
    before = loaded_tokens(module_daemon)
    second = start_stages()
    assert second.tokens(ASKED, 16) == expected
    wait_loaded(module_daemon, before + loadable_tokens(ASKED))
    failures = int(module_daemon.stats()["checksum_failures"])
    turn_bits(module_daemon)
    for _ in range(2):
        assert second.tokens(ASKED, 16) == expected
    wait_until(lambda: int(module_daemon.stats()["checksum_failures"]) > failures, "the daemon has heard of bad chunks")


def test_stages_of_a_hybrid_model_share_with_an_engine_of_one(
    start_engine: StartEngine, plain: Callable[[Geometry], Engine], module_daemon: Daemon
) -> None:
    """Each stage has one layer of full attention and three of a window."""
    joint = {"kvpool.head_groups": 1, "kvpool.always_load": True, "kvpool.wait_s": 10.0, "kvpool.timeout_s": 10.0}
    asked, others = prompts(first=2150), prompts(first=2170)
    expected = [plain(HYBRID).tokens(ids, 16) for ids in (asked, others)]
    one = start_engine(HYBRID, socket=module_daemon.socket, settings=joint)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PP_LAYER_PARTITION", "4,4")
        staged = start_engine(
            HYBRID,
            socket=module_daemon.socket,
            settings=joint,
            in_process=False,
            pipeline_parallel_size=STAGES,
            distributed_executor_backend="mp",
            enforce_eager=False,
            compilation_config={"mode": 2, "backend": "eager"},
        )
    for writer, reader, ids, right in ((one, staged, asked, expected[0]), (staged, one, others, expected[1])):
        assert writer.tokens(ids, 16) == right
        wait_until(lambda: int(module_daemon.stats()["joint_chunks"]) == 0, "no chunk is incomplete")
        before = loaded_tokens(module_daemon)
        assert reader.tokens(ids, 16) == right
        wait_loaded(module_daemon, before + loadable_tokens(ids))
    assert not module_daemon.problems()
    staged.close()
