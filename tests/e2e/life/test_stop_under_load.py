"""A planned stop while engines save: acknowledged chunks are stored in the next life, and no client delays the stop."""

import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.layouts import CASES
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, store, tokens_of
from tests.rigs.prompts import Ranks, begin, prompt
from tests.rigs.prompts import store as store_part

ENGINES = 8
CHUNKS = 12


@pytest.fixture
def stop_timeout() -> str:
    return "600s"


@pytest.fixture
def tiered(start_daemon: Callable[..., Daemon], tmp_path: Path, stop_timeout: str) -> Daemon:
    daemon = start_daemon(
        dram__capacity="128MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="1GiB",
        ssd__watermark="1",  # nothing is demoted before the stop
        server__stop_timeout=stop_timeout,
    )
    wait_open(daemon)
    return daemon


def wait_open(daemon: Daemon) -> None:
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")


class Engine(threading.Thread):
    """Saves prompt after prompt until the daemon declines or is gone."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        super().__init__()
        self._daemon, self._number = daemon, number
        self.saved: list[tuple[kv.KeyChain, int]] = []  # prompts, and how many leading chunks are acknowledged

    def run(self) -> None:
        with self._daemon.connect() as pool:
            for prompt in itertools.count():
                keys = pool.keys(tokens_of(1000 * self._number + prompt, CHUNKS * SMALL.chunk_tokens))
                result = store(pool, keys)
                acknowledged = 0
                while acknowledged < CHUNKS and result.states[acknowledged] in ("stored", "present"):
                    acknowledged += 1
                self.saved.append((keys, acknowledged))
                if {"stopping", "disconnected"} & set(result.reasons):
                    return


@pytest.mark.slow
def test_every_chunk_acknowledged_under_load_is_stored_after_the_stop(tiered: Daemon) -> None:
    engines = [Engine(tiered, number) for number in range(ENGINES)]
    for one in engines:
        one.start()
    wait_until(lambda: all(len(one.saved) > 5 for one in engines), "engines save")
    assert tiered.stop() == 0
    for one in engines:
        one.join()
    tiered.start()
    wait_open(tiered)
    lost = 0
    with tiered.connect() as pool:
        for keys, acknowledged in (saved for one in engines for saved in one.saved):
            result, into = load_all(pool, keys)
            assert_right_bytes(keys, SMALL, result, into)
            lost += max(0, acknowledged - result.chunks)
    assert lost == 0
    assert tiered.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("stop_timeout", ["1s"])
def test_a_save_that_never_ends_does_not_delay_the_stop(tiered: Daemon) -> None:
    with tiered.connect() as pool, engine(tiered) as idle:
        keys = pool.keys(tokens_of(7, 100 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 100
        made = idle.call(reserve_chain(b"", keys_of(5000, 4)), m.Reserved)
        assert made.reservation
        assert tiered.stop(60.0) == 0
    tiered.start()
    wait_open(tiered)
    with tiered.connect() as pool:
        assert pool.lookup(keys).chunks == 100


def test_a_save_under_way_may_end_and_a_new_one_is_declined(tiered: Daemon) -> None:
    with tiered.connect() as pool, engine(tiered) as slow:
        keys = pool.keys(tokens_of(8, CHUNKS * SMALL.chunk_tokens))
        made = slow.call(reserve_chain(b"", keys_of(6000, 2)), m.Reserved)
        tiered.signal(signal.SIGTERM)
        wait_until(lambda: store(pool, keys).reasons.get("stopping") == 1, "new saves are declined")
        sums = bytes(4 * SMALL.layers * 2)
        assert slow.call(m.Commit(made.reservation, sums, b""), m.Committed).states == bytes([SaveState.STORED] * 2)
        assert tiered.process is not None
        assert tiered.process.wait(60.0) == 0
    assert " 0 dropped with the DRAM tier, durable: yes" in tiered.log()


def test_chunks_leased_at_the_stop_are_demoted_too(tiered: Daemon) -> None:
    with tiered.connect() as pool:
        keys = pool.keys(tokens_of(9, CHUNKS * SMALL.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        lease = pool.acquire(pool.lookup(keys))
        assert lease.chunks == CHUNKS
        assert tiered.stop() == 0
    tiered.start()
    wait_open(tiered)
    with tiered.connect() as pool:
        assert pool.lookup(keys).chunks == CHUNKS


def test_chunks_behind_which_a_part_of_a_save_is_missing_are_demoted_too(tiered: Daemon) -> None:
    with Ranks(CASES["stages"], tiered.connect) as ranks:
        keys = ranks.prompt(10, 2 * CHUNKS)
        assert ranks.store(keys, chunks=CHUNKS) == CHUNKS
        assert store_part(ranks.first, keys).part == CHUNKS
        assert tiered.stop() == 0
        assert " 0 dropped with the DRAM tier, durable: yes" in tiered.log()
        tiered.start()
        wait_open(tiered)
        wait_until(lambda: all(pool.connected for pool in ranks.pools), "the pools connect again")
        ranks.assert_served(keys, CHUNKS)


def test_chunks_that_others_than_leases_hold_are_demoted_by_order(tiered: Daemon) -> None:
    with tiered.connect() as pool, tiered.admin() as admin:
        promised, announced, continued = (prompt(pool, seed, CHUNKS) for seed in (11, 12, 13))
        for keys in (promised, announced, continued):
            assert store_part(pool, keys, chunks=CHUNKS - 1).stored == CHUNKS - 1
        with pool.acquire(pool.lookup(promised)) as lease:
            assert lease.ticket()
        assert pool.announce(announced).announced == CHUNKS - 1
        save = begin(pool, continued)
        assert admin.demote_all(60.0)["left"] == 0
        assert save.commit().stored == 1


def test_a_stop_without_time_reports_how_much_it_drops(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(
        dram__capacity="128MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="1GiB",
        ssd__watermark="1",
        ssd__stop_timeout="0s",
    )
    wait_open(daemon)
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(10, CHUNKS * SMALL.chunk_tokens))
        assert pool.save(keys, from_=payload_of(keys, SMALL)).commit() is not None
    assert daemon.stop() == 0
    assert "12 dropped with the DRAM tier" in daemon.log()
