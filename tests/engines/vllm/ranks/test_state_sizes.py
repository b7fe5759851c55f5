"""Recurrent states between engines of tensor-parallel size 1 and 2: each goes on from the states that the other one has stored.

vLLM computes them on a CPU in bfloat16 alone, whose last bits depend on the size: the prompts are those whose answers do not.
"""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import RECURRENT, RECURRENT_BLOCK, Geometry
from tests.rigs.daemon import Daemon, wait_until

JOINT = {"kvpool.head_groups": 2, "kvpool.chunk_tokens": 0}
COUNT, CLEAR = 2, 3  # tokens of an answer, and so many prompts at least


def answers(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """The tokens of prompts that are asked one by one."""
    return [engine.tokens([ids], COUNT)[0] for ids in asked]


@pytest.fixture(scope="module")
def engines(start_engine: StartEngine, module_daemon: Daemon) -> dict[int, Engine]:
    one = start_engine(RECURRENT, socket=module_daemon.socket, settings=JOINT)
    two = start_engine(
        RECURRENT,
        socket=module_daemon.socket,
        settings=JOINT,
        in_process=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    return {1: one, 2: two}


@pytest.mark.parametrize("writer", [1, 2])
def test_what_one_size_has_stored_the_other_one_goes_on_from(
    writer: int, engines: dict[int, Engine], plain: Callable[[Geometry], Engine], module_daemon: Daemon
) -> None:
    candidates = [prompt(3300 + 20 * writer + place, 300 + 90 * place) for place in range(8)]
    asked = plain(RECURRENT).clear_prompts(candidates, COUNT)
    assert len(asked) >= CLEAR
    expected = answers(plain(RECURRENT), asked)
    with module_daemon.admin() as admin:
        admin.flush(None, None)
    assert answers(engines[writer], asked) == expected
    whole = sum((len(ids) - 1) // RECURRENT_BLOCK for ids in asked)
    wait_until(lambda: int(module_daemon.stats()["dram.chunks"]) >= whole, "all is stored")
    wait_until(lambda: int(module_daemon.stats()["joint_chunks"]) == 0, "no chunk is incomplete")
    stored, before = int(module_daemon.stats()["dram.chunks"]), loaded_tokens(module_daemon)
    assert answers(engines[3 - writer], asked) == expected
    wait_loaded(module_daemon, before + whole * RECURRENT_BLOCK)
    assert int(module_daemon.stats()["dram.chunks"]) == stored, "nothing was stored twice"
    assert not module_daemon.problems()
