"""Engines of tensor-parallel size 1 and 2 that share chunks: each reads what the other one has stored."""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, chunks_in_dram, external_tokens, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, HYBRID, SINGLE, Geometry
from tests.rigs.daemon import Daemon, wait_until

JOINT = {"kvpool.head_groups": 2}
STORED_TIMEOUT_S = 120.0


@pytest.fixture(scope="module", params=[GROUPED, SINGLE, HYBRID], ids=lambda geometry: geometry.name)
def geometry(request: pytest.FixtureRequest) -> Geometry:
    found: Geometry = request.param
    return found


@pytest.fixture(scope="module")
def one(geometry: Geometry, start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(geometry, socket=module_daemon.socket, settings=JOINT)


@pytest.fixture(scope="module")
def two(geometry: Geometry, start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(
        geometry,
        socket=module_daemon.socket,
        settings=JOINT,
        in_process=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )


def _store(engine: Engine, daemon: Daemon, asked: list[list[int]], expected: list[list[int]]) -> None:
    """Have an engine compute prompts until it loads all of their chunks."""
    with daemon.admin() as admin:
        admin.flush(None, None)

    def are_stored() -> bool:
        loaded = external_tokens(engine)
        assert engine.tokens(asked, 16) == expected
        return external_tokens(engine) - loaded >= loadable_tokens(asked)

    wait_until(are_stored, "every chunk is whole", STORED_TIMEOUT_S)
    assert int(daemon.stats()["joint_chunks"]) == 0


@pytest.mark.parametrize("stores", ["one", "two"])
def test_what_one_size_has_stored_the_other_one_loads(
    stores: str,
    geometry: Geometry,
    one: Engine,
    two: Engine,
    module_daemon: Daemon,
    plain: Callable[[Geometry], Engine],
) -> None:
    asked = prompts(first=2200 if stores == "one" else 2220)
    expected = plain(geometry).tokens(asked, 16)
    writer, reader = (one, two) if stores == "one" else (two, one)
    _store(writer, module_daemon, asked, expected)
    stored = chunks_in_dram(module_daemon)
    loaded = loaded_tokens(module_daemon)
    assert reader.tokens(asked, 16) == expected
    wait_loaded(module_daemon, loaded + loadable_tokens(asked))
    assert chunks_in_dram(module_daemon) == stored, "nothing was stored twice"
    assert not module_daemon.problems()


def test_bad_bytes_of_some_heads_change_no_token(
    geometry: Geometry, one: Engine, two: Engine, module_daemon: Daemon, plain: Callable[[Geometry], Engine]
) -> None:
    asked = prompts(first=2240)
    expected = plain(geometry).tokens(asked, 16)
    _store(one, module_daemon, asked, expected)
    turn_bits(module_daemon)
    for _ in range(2):
        assert two.tokens(asked, 16) == expected
        assert one.tokens(asked, 16) == expected
