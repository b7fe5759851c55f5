"""Layers of full attention with other numbers of KV heads on the real engine: one block table, blocks of several sizes."""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, external_tokens
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import UNEVEN, UNEVEN_KV_HEADS
from tests.rigs.daemon import Daemon, wait_until

ITS_CODE = {"trust_remote_code": True}
ASKED = [prompt(4000 + index, length) for index, length in enumerate((900, 333, 256))]
WHOLE = sum((len(ids) - 1) // CHUNK_TOKENS * CHUNK_TOKENS for ids in ASKED)


@pytest.fixture(scope="module")
def expected(start_engine: StartEngine) -> list[list[int]]:
    with start_engine(UNEVEN, **ITS_CODE) as alone:
        return alone.tokens(ASKED, 16)


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(UNEVEN, socket=module_daemon.socket, **ITS_CODE)


def test_all_but_the_last_tokens_are_loaded(
    engine: Engine, module_daemon: Daemon, expected: list[list[int]], report: Callable[[str], None]
) -> None:
    assert engine.tokens(ASKED, 16) == expected
    chunks = sum(len(ids) // CHUNK_TOKENS for ids in ASKED)
    groups = len(set(UNEVEN_KV_HEADS))
    wait_until(lambda: int(module_daemon.stats()["dram.chunks"]) >= groups * chunks, "all is stored")
    assert int(module_daemon.stats()["dram.chunks"]) == groups * chunks, "a group for each size of blocks"
    assert engine.tokens(ASKED, 16) == expected
    assert external_tokens(engine) == WHOLE
    report(f"{WHOLE} of {sum(map(len, ASKED))} tokens")


def test_another_engine_loads_them(
    engine: Engine, start_engine: StartEngine, module_daemon: Daemon, expected: list[list[int]]
) -> None:
    assert engine.tokens(ASKED, 16) == expected
    with start_engine(UNEVEN, socket=module_daemon.socket, **ITS_CODE) as fresh:
        assert fresh.tokens(ASKED, 16) == expected
        assert external_tokens(fresh) == WHOLE


def test_flipped_bits_in_any_size_of_blocks_change_no_token(
    engine: Engine, module_daemon: Daemon, expected: list[list[int]]
) -> None:
    assert engine.tokens(ASKED, 16) == expected
    turn_bits(module_daemon)
    for _ in range(3):
        assert engine.tokens(ASKED, 16) == expected
    loaded = external_tokens(engine)
    assert engine.tokens(ASKED, 16) == expected
    assert external_tokens(engine) > loaded, "what was computed instead is stored and loaded"
