"""Chunks whose bits have changed in DRAM or on disk: they are computed, others of the same job are loaded, no token changes."""

import random
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, wait_on_disk, wait_restored
from tests.engines.vllm.rigs.arena_bits import turn_bits
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import TOKENS, answers, loaded, wait_kept, whole_chunks
from tests.faults.rigs.damage import flip_bits, slots_in
from tests.rigs.daemon import wait_until

FIRST = prompt(5400, 520)
ASKED = [FIRST, FIRST[:450] + prompt(5401, 90), FIRST + prompt(5402, 70)]
# The three have 14 chunks in common, two of them all 16 of the first.
CHUNKS = 16 + (16 - 14) + (18 - 16)


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[list[int]]:
    return plain(GROUPED).tokens(ASKED, TOKENS)


@pytest.mark.parametrize("requests", [1, 3], ids=["alone", "beside-others-with-its-prefix"])
def test_changed_bits_in_dram_change_no_token(requests: int, tiered: Survivor, expected: list[list[int]]) -> None:
    engine, asked = tiered.engine, ASKED[:requests]
    chunks = CHUNKS if requests > 1 else whole_chunks(asked)
    with tiered.daemon() as daemon:
        assert answers(engine, asked) == expected[:requests]
        wait_kept(daemon, chunks)
        turn_bits(daemon, every=90)
        before = loaded(engine)
        assert answers(engine, asked) == expected[:requests]
        assert loaded(engine) - before < chunks, "the bad ones are not loaded"
        wait_until(lambda: int(daemon.stats()["checksum_failures"]) > 0, "the daemon has heard of the bad chunks")
        assert answers(engine, asked) == expected[:requests]
        wait_kept(daemon, chunks)
        before = loaded(engine)
        assert answers(engine, asked) == expected[:requests]
        assert loaded(engine) - before == chunks, "what was computed instead is stored and loaded"
        assert not daemon.problems()


def test_a_job_that_fails_in_part_loads_the_rest(tiered: Survivor, expected: list[list[int]]) -> None:
    """One bad chunk in the middle: what lies before it is loaded, and it is computed with what follows."""
    with tiered.daemon() as daemon:
        assert answers(tiered.engine, [FIRST]) == expected[:1]
        wait_kept(daemon, whole_chunks([FIRST]))
        hits = tiered.engine.ask("counters")["external_prefix_cache_hits"]
        tiered.engine.ask("spoil", chunk=8, is_set=True)
        assert answers(tiered.engine, [FIRST]) == expected[:1]
        assert tiered.engine.ask("has_spoiled")["spoiled"]
        assert tiered.engine.ask("counters")["external_prefix_cache_hits"] - hits == 8 * 32


def test_changed_bits_on_disk_change_no_token(
    tiered: Survivor, tmp_path: Path, seed: int, expected: list[list[int]]
) -> None:
    dice, engine = random.Random(seed), tiered.engine
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB", "ssd.write_through": "true"}
    with tiered.daemon(**options) as daemon:
        assert answers(engine, ASKED) == expected
        wait_on_disk(daemon, CHUNKS)
        daemon.kill()
        for segment in (tmp_path / "ssd").glob("segment-*.kvs"):
            slots = dice.sample(found := slots_in(segment), len(found) // 4)
            flip_bits(segment, [slot + 4096 + dice.randrange(4096) for slot in slots], dice)
        daemon.start()
        wait_restored(daemon, CHUNKS)
        tiered.wait_served(daemon)
        before = loaded(engine)
        for _ in range(2):
            assert answers(engine, ASKED) == expected
        assert int(daemon.stats()["ssd.corrupt_chunks"]) > 0
        assert loaded(engine) > before
