"""One connection that takes all it can get: others save and load beside it, whatever it has reserved, leased or let expire."""

from collections.abc import Callable

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.states import SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of, read_back, reserve, store
from tests.rigs.daemon import SMALL, Daemon, wait_until

GREEDY_CHUNKS = 16_384
DRAM_BYTES = 4 << 20
DRAM_CHUNKS = DRAM_BYTES // SMALL.chunk_bytes
HALF = DRAM_CHUNKS // 2
CAPACITY = f"{DRAM_BYTES}B"


def _store_and_load(connection: BlockingConnection, seed: int) -> None:
    keys = keys_of(0, DRAM_CHUNKS // 8, seed)
    store(connection, keys)
    assert read_back(connection, keys) == [True] * (DRAM_CHUNKS // 8)


@pytest.mark.parametrize("ttl", ["1h", "3s"])
def test_others_save_and_load_beside_one_frame_that_reserves_everything(
    start_daemon: Callable[..., Daemon], ttl: str
) -> None:
    daemon = start_daemon(server__reservation_ttl=ttl, dram__connection_quota="0.5", dram__capacity=CAPACITY)
    with engine(daemon) as good, engine(daemon) as hostile:
        store(good, keys_of(0, DRAM_CHUNKS // 8))
        made = reserve(hostile, keys_of(0, GREEDY_CHUNKS, seed=1))
        states = np.frombuffer(made.states, np.uint8)
        assert np.count_nonzero(states == SaveState.RESERVED) == HALF
        assert states[HALF] == SaveState.QUOTA
        assert daemon.stats()["declined_quota"] == 1
        if ttl == "3s":
            wait_until(lambda: daemon.stats()["dram.zombie_slots"] == HALF, "the reservation expires")
        # A silent client holds its slots until its socket closes; it gets no others.
        assert reserve(hostile, keys_of(0, 100, seed=2)).states[0] == SaveState.QUOTA
        for seed in range(3, 9):
            _store_and_load(good, seed)
        stats = daemon.stats()
        kind = "zombie" if ttl == "3s" else "reserved"
        assert stats[f"held.{kind}_bytes"] == HALF * SMALL.chunk_bytes
        assert (
            max(value for name, value in stats.items() if name.endswith(f".{kind}_bytes")) == HALF * SMALL.chunk_bytes
        )
    wait_until(lambda: daemon.stats()["held.connections"] == 0, "what it kept goes with its socket")
    assert daemon.problems() == []


def test_others_save_and_load_beside_one_that_leases_everything(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__connection_quota="0.5", dram__capacity=CAPACITY)
    with engine(daemon) as good, engine(daemon) as hostile:
        for seed in range(8):
            store(good, keys_of(0, DRAM_CHUNKS // 8, seed))
        leased = [hostile.call(m.Acquire(keys_of(0, DRAM_CHUNKS // 8, seed)), m.Leased).chunks for seed in range(8)]
        assert leased[:4] == [DRAM_CHUNKS // 8] * 4
        assert sum(leased) <= HALF
        for seed in range(10, 16):
            _store_and_load(good, seed)
    assert daemon.problems() == []


def test_a_connection_may_be_allowed_the_whole_tier(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__connection_quota="1.0", dram__capacity=CAPACITY)
    with engine(daemon) as alone:
        made = reserve(alone, keys_of(0, GREEDY_CHUNKS))
        assert made.states.count(SaveState.RESERVED) == DRAM_CHUNKS
        assert made.states[DRAM_CHUNKS] == SaveState.FULL
    assert daemon.problems() == []


def test_chunks_of_a_few_bytes_count_by_the_slots_they_take(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__connection_quota="0.5", dram__capacity=CAPACITY)
    tiny = kv.Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=1, planes=1)
    slots = DRAM_BYTES // 4096
    with engine(daemon) as good, engine(daemon, tiny, "tiny") as hostile:
        _store_and_load(good, 0)
        made = reserve(hostile, keys_of(0, GREEDY_CHUNKS, seed=1))
        assert made.states.count(SaveState.RESERVED) == slots // 2
        assert made.states[slots // 2] == SaveState.QUOTA
        for seed in range(2, 8):
            _store_and_load(good, seed)
    assert daemon.problems() == []
