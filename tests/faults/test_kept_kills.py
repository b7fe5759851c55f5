"""SIGKILL at random instants of a daemon whose memory is kept, while a client saves and loads: what was acknowledged stays."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, wait_connected
from tests.rigs.kept_daemon import KeptDaemon
from tests.rigs.payload import payload_of, tokens_of
from tests.rigs.tiered_chains import load_right

CHAIN = 12
# Between the start of a life and its end, at random: some end before their client is back.
LIVED_S_MAX = 0.25
FIND_EVERY = 5
KILLS, KILLS_OF_CAMPAIGN = 6, 300
CAPACITY, CHAINS_MAX = "256MiB", 1500  # nothing is evicted


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptDaemon]:
    """A daemon whose keeper ends with the test."""
    daemon = KeptDaemon(tmp_path, **{"dram.capacity": CAPACITY, "dram.prefault": "false"})
    with daemon:
        yield daemon


def _keys(pool: kv.Pool, number: int) -> kv.KeyChain:
    return pool.keys(tokens_of(number, CHAIN * SMALL.chunk_tokens))


def _saved(pool: kv.Pool, number: int) -> int:
    """How many leading chunks of a chain a save was acknowledged for."""
    keys = _keys(pool, number)
    result = pool.save(keys, from_=payload_of(keys, pool.layout)).commit()
    return 0 if result is None or result.declined else result.stored + result.present


def _kill_at_random(kept: KeptDaemon, pool: kv.Pool, chance: random.Random, acknowledged: list[int], first: int) -> int:
    """Save and load until the daemon has been killed; the number of the next chain."""
    killer = threading.Timer(chance.uniform(0.0, LIVED_S_MAX), kept.kill)
    killer.start()
    number = first
    while killer.is_alive():
        if len(acknowledged) < CHAINS_MAX and _saved(pool, number) == CHAIN:
            acknowledged.append(number)
        number += 1
        if acknowledged and (number % FIND_EVERY == 0 or len(acknowledged) == CHAINS_MAX):
            load_right(pool, _keys(pool, chance.choice(acknowledged)))
    killer.join()
    return number


def _run(kept: KeptDaemon, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    acknowledged: list[int] = []
    number = 0
    with kept.connect() as pool:
        for life in range(2, kills + 2):
            number = _kill_at_random(kept, pool, chance, acknowledged, number)
            kept.start()
            wait_connected(pool)
            assert kept.info()["dram_life"] == life
            assert kept.problems(deep=False) == []
        found = [load_right(pool, _keys(pool, chain)).chunks for chain in acknowledged]
        assert found == [CHAIN] * len(acknowledged)
        assert kept.problems() == []
    print(f"{kills} kills, {len(acknowledged)} chains acknowledged, all found")


def test_what_was_acknowledged_outlives_every_kill(kept: KeptDaemon, seed: int) -> None:
    _run(kept, seed, KILLS)


@pytest.mark.campaign
def test_what_was_acknowledged_outlives_hundreds_of_kills(kept: KeptDaemon, seed: int) -> None:
    _run(kept, seed, KILLS_OF_CAMPAIGN)
