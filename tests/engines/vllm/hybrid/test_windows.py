"""Hybrid models on the real engine: sliding windows beside full attention, and windows alone."""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, external_tokens, wait_restored, wait_served
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine, tokens_of_answer
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import EXPERTS, HYBRID, LOCAL, WINDOWED, Geometry
from tests.rigs.daemon import Daemon, wait_until

LONG = 1500
# Of all layers of all chunks of a prompt of LONG tokens: a full layer in four, and windows of a chunk before its end.
STORED_SHARE_MAX = 0.6
LITTLE_ROOM = {"hybrid": 70, "experts": 50, "windowed": 30, "local": 80}


@pytest.fixture(scope="module", params=[HYBRID, EXPERTS, WINDOWED, LOCAL], ids=lambda geometry: geometry.name)
def geometry(request: pytest.FixtureRequest) -> Geometry:
    found: Geometry = request.param
    return found


@pytest.fixture(scope="module")
def engine(geometry: Geometry, start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(geometry, socket=module_daemon.socket)


def test_a_long_prompt_is_loaded_but_for_its_last_tokens(
    geometry: Geometry, engine: Engine, module_daemon: Daemon, plain: Plain, report: Callable[[str], None]
) -> None:
    asked = [prompt(2000, LONG)]
    expected = plain(geometry).tokens(asked, 16)
    before = int(module_daemon.stats()["dram.used_bytes"])
    engine.ask("blocks_in_use")
    assert engine.tokens(asked, 16) == expected
    used = engine.ask("blocks_in_use")["most"]
    stored = int(module_daemon.stats()["dram.used_bytes"]) - before
    everything = LONG // CHUNK_TOKENS * CHUNK_TOKENS * geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * 4
    loaded = external_tokens(engine)
    assert engine.tokens(asked, 16) == expected
    assert external_tokens(engine) - loaded >= 0.9 * LONG
    assert engine.ask("blocks_in_use")["most"] <= used
    assert stored <= STORED_SHARE_MAX * everything
    report(f"{geometry.name}: {stored / everything:.2f} of all layers of all chunks")


def test_another_engine_loads_what_one_has_stored(
    geometry: Geometry, engine: Engine, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    asked = [prompt(2010, 700), prompt(2011, 333), prompt(2012, 256)]
    expected = plain(geometry).tokens(asked, 16)
    assert engine.tokens(asked, 16) == expected
    fresh = start_engine(geometry, socket=module_daemon.socket, in_process=geometry is WINDOWED)
    loaded = int(module_daemon.stats()["usage.loaded_tokens"])
    assert fresh.tokens(asked, 16) == expected
    wanted = sum((len(ids) - 1) // CHUNK_TOKENS * CHUNK_TOKENS for ids in asked)
    wait_until(lambda: int(module_daemon.stats()["usage.loaded_tokens"]) - loaded >= wanted, "all chunks are loaded")
    fresh.close()


def test_little_room_pieces_and_preemption_change_no_token(
    geometry: Geometry, start_engine: StartEngine, module_daemon: Daemon, plain: Plain, report: Callable[[str], None]
) -> None:
    cramped = start_engine(
        geometry,
        socket=module_daemon.socket,
        num_gpu_blocks_override=LITTLE_ROOM[geometry.name],
        max_model_len=800,
        max_num_batched_tokens=90,
        max_num_seqs=16,
    )
    asked = [prompt(2020 + index, 150 + 17 * index) for index in range(8)]
    expected = plain(geometry).tokens(asked, 150)
    for _ in range(2):
        assert cramped.tokens(asked, 150) == expected
    again = [prompt(2040, 650), prompt(2041, 321)]
    for _ in range(2):
        loaded = external_tokens(cramped)
        assert cramped.tokens(again, 16) == plain(geometry).tokens(again, 16)
    assert external_tokens(cramped) - loaded >= 0.9 * 650
    report(f"{cramped.ask('preemptions')['count']} preemptions")
    cramped.close()


def test_flipped_bits_in_any_group_change_no_token(
    geometry: Geometry, engine: Engine, module_daemon: Daemon, plain: Plain
) -> None:
    asked = [prompt(2050, 520), prompt(2051, 300)]
    expected = plain(geometry).tokens(asked, 16)
    assert engine.tokens(asked, 16) == expected
    turn_bits(module_daemon)
    for _ in range(3):
        assert engine.tokens(asked, 16) == expected
    loaded = external_tokens(engine)
    assert engine.tokens(asked, 16) == expected
    assert external_tokens(engine) > loaded, "what was computed instead is stored and loaded"


def test_a_shared_prefix_is_a_hit_for_prompts_that_go_on_otherwise(
    geometry: Geometry, engine: Engine, plain: Plain
) -> None:
    """With windows alone no chunk shows how far other prompts have gone the same way."""
    shared = prompt(2060, 512)
    asked = [[*shared, *prompt(2061 + index, 150)] for index in range(3)]
    for index, ids in enumerate(asked):
        loaded = external_tokens(engine)
        assert engine.tokens([ids], 16) == plain(geometry).tokens([ids], 16)
        if index == 2:
            assert external_tokens(engine) - loaded == (0 if geometry is WINDOWED else len(shared))


def test_the_engines_own_prefixes_and_the_pools_go_together(geometry: Geometry, engine: Engine, plain: Plain) -> None:
    """A part of the prompt is in vLLM's own cache, with the windows at its end, and the rest in the pool."""
    whole = prompt(2070, 900)
    expected = plain(geometry).tokens([whole], 16)
    assert engine.tokens([whole], 16) == expected
    engine.forget()
    engine.ask("generate", prompts=[whole[:400]], tokens=1)
    loaded = external_tokens(engine)
    assert tokens_of_answer(engine.ask("generate", prompts=[whole], tokens=16)) == expected
    assert external_tokens(engine) > loaded


def test_chunks_survive_a_restart_on_disk(
    start_engine: StartEngine, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("hybrid")
    options = {"ssd.path": str(directory / "ssd"), "ssd.capacity": "128MiB", "ssd.write_through": "true"}
    asked = [prompt(2080, 700), prompt(2081, 333)]
    expected = plain(HYBRID).tokens(asked, 16)
    with Daemon(directory, **{"dram.capacity": "128MiB"}, **options) as daemon:
        engine = start_engine(HYBRID, socket=daemon.socket)
        assert engine.tokens(asked, 16) == expected
        wait_until(lambda: daemon.stats()["ssd.chunks"] == daemon.stats()["dram.chunks"], "every chunk is on disk")
        chunks = int(daemon.stats()["dram.chunks"])
        assert daemon.stop() == 0
        assert engine.tokens(asked, 16) == expected, "without a daemon"
        daemon.start()
        wait_restored(daemon, chunks)
        wait_served(engine, daemon)
        loaded = external_tokens(engine)
        assert engine.tokens(asked, 16) == expected
        assert external_tokens(engine) - loaded >= 0.9 * 1033
        daemon.kill()
        assert engine.tokens(asked, 16) == expected, "killed"
