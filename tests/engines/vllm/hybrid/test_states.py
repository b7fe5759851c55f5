"""Recurrent states on the real engine: a tiny Qwen3-Next, whose linear layers have a state in place of KV.

vLLM computes them on a CPU in bfloat16 alone, where a token's last bits depend on how requests are put together: prompts are
asked one by one, and steps of a prompt end at ends of blocks with the pool and without it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, external_tokens, wait_restored, wait_served
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import RECURRENT, RECURRENT_BLOCK
from tests.rigs.daemon import Daemon, wait_until

LONG = 1500
OWN_CHUNKS = {"kvpool.chunk_tokens": 0}


def answers(engine: Engine, asked: list[list[int]], count: int = 16) -> list[list[int]]:
    """The tokens of prompts that are asked one by one."""
    return [engine.tokens([ids], count)[0] for ids in asked]


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(RECURRENT, socket=module_daemon.socket, settings=OWN_CHUNKS)


def test_a_long_prompt_is_loaded_but_for_its_last_tokens(
    engine: Engine, module_daemon: Daemon, plain: Plain, report: Callable[[str], None]
) -> None:
    asked = [prompt(3000, LONG)]
    expected = answers(plain(RECURRENT), asked)
    before = int(module_daemon.stats()["dram.chunks"])
    engine.ask("blocks_in_use")
    assert answers(engine, asked) == expected
    used = engine.ask("blocks_in_use")["most"]
    chunks = LONG // RECURRENT_BLOCK
    wait_until(lambda: int(module_daemon.stats()["dram.chunks"]) >= before + chunks + 3, "all is stored")
    stored = int(module_daemon.stats()["dram.chunks"]) - before
    loaded = external_tokens(engine)
    assert answers(engine, asked) == expected
    assert external_tokens(engine) - loaded == chunks * RECURRENT_BLOCK >= 0.9 * LONG
    assert engine.ask("blocks_in_use")["most"] <= used
    assert stored == chunks + RECURRENT.layers - 1, "of each layer with a state one, of the others every chunk"
    report(f"{stored / (chunks * RECURRENT.layers):.2f} of all layers of all chunks")


def test_another_engine_loads_what_one_has_stored(
    engine: Engine, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    asked = [prompt(3010, 700), prompt(3011, 333), prompt(3012, 289), prompt(3013, 200)]
    expected = answers(plain(RECURRENT), asked)
    assert answers(engine, asked) == expected
    fresh = start_engine(RECURRENT, socket=module_daemon.socket, settings=OWN_CHUNKS, in_process=False)
    loaded = int(module_daemon.stats()["usage.loaded_tokens"])
    assert answers(fresh, asked) == expected
    wanted = sum((len(ids) - 1) // RECURRENT_BLOCK * RECURRENT_BLOCK for ids in asked)
    wait_until(lambda: int(module_daemon.stats()["usage.loaded_tokens"]) - loaded >= wanted, "all chunks are loaded")
    fresh.close()


def test_pieces_and_preemption_change_no_token_and_shared_ways_are_hits(
    start_engine: StartEngine, module_daemon: Daemon, report: Callable[[str], None]
) -> None:
    """In steps of a block each end of a block is one that a prompt can go on from."""
    options = {"max_num_batched_tokens": RECURRENT_BLOCK + 20, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
    alone = start_engine(RECURRENT, enable_prefix_caching=True, **options)
    cramped = start_engine(RECURRENT, socket=module_daemon.socket, settings=OWN_CHUNKS, **options)
    shared = prompt(3020, 3 * RECURRENT_BLOCK)
    asked = [[*shared, *prompt(3021 + index, 400)] for index in range(4)]
    expected = answers(alone, asked)
    for index, ids in enumerate(asked):
        loaded = external_tokens(cramped)
        assert answers(cramped, [ids]) == [expected[index]]
        if index >= 2:
            assert external_tokens(cramped) - loaded >= 3 * RECURRENT_BLOCK
    many = [prompt(3030 + index, 500 + 40 * index) for index in range(6)]
    for _ in range(2):
        assert len(cramped.tokens(many, 300)) == len(
            many
        )  # several at once: their last bits are not those of one alone
    again = [prompt(3040, LONG)]
    for _ in range(2):
        assert answers(cramped, again) == answers(alone, again)
    preemptions = cramped.ask("preemptions")["count"]
    assert preemptions, "several long answers have no room at once"
    report(f"{preemptions} preemptions")
    for one in (alone, cramped):
        one.close()


def test_flipped_bits_in_states_and_chunks_change_no_token(engine: Engine, module_daemon: Daemon, plain: Plain) -> None:
    asked = [prompt(3050, 900), prompt(3051, 300)]
    expected = answers(plain(RECURRENT), asked)
    assert answers(engine, asked) == expected
    turn_bits(module_daemon)
    for _ in range(3):
        assert answers(engine, asked) == expected
    loaded = external_tokens(engine)
    assert answers(engine, asked) == expected
    assert external_tokens(engine) > loaded, "what was computed instead is stored and loaded"


def test_generated_tokens_are_loaded_by_the_next_turn(start_engine: StartEngine, module_daemon: Daemon) -> None:
    engine = start_engine(RECURRENT, socket=module_daemon.socket, settings={**OWN_CHUNKS, "kvpool.save": "all"})
    asked = prompt(3060, 600)
    turn = [*asked, *engine.tokens([asked], 320)[0], 7]
    loaded = external_tokens(engine)
    engine.tokens([turn], 8)
    assert external_tokens(engine) - loaded == len(turn) // RECURRENT_BLOCK * RECURRENT_BLOCK > len(asked)
    engine.close()


def test_states_come_back_from_disk_and_a_killed_daemon_changes_no_token(
    start_engine: StartEngine, tmp_path: Path, plain: Plain
) -> None:
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "128MiB", "ssd.write_through": "true"}
    asked = [prompt(3070, 1000), prompt(3071, 650)]
    expected = answers(plain(RECURRENT), asked)
    with Daemon(tmp_path, **{"dram.capacity": "128MiB"}, **options) as daemon:
        engine = start_engine(RECURRENT, socket=daemon.socket, settings=OWN_CHUNKS)
        assert answers(engine, asked) == expected
        wait_until(lambda: daemon.stats()["ssd.chunks"] == daemon.stats()["dram.chunks"], "every chunk is on disk")
        chunks = int(daemon.stats()["dram.chunks"])
        assert daemon.stop() == 0
        assert answers(engine, asked) == expected, "without a daemon"
        daemon.start()
        wait_restored(daemon, chunks)
        wait_served(engine, daemon)
        loaded = external_tokens(engine)
        assert answers(engine, asked) == expected
        assert external_tokens(engine) - loaded == (3 + 2) * RECURRENT_BLOCK
        daemon.kill()
        assert answers(engine, asked) == expected, "killed"
        engine.close()
