"""Chunks read where they lie: right addresses, verified in place, renewed, and not taken for what took their place."""

import contextlib
import gc
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.copying.leased_memory import LeasedMemory
from tests.rigs.daemon import SMALL, Daemon, Start, in_both_write_modes, wait_connected, wait_until
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import bytes_at, chunk_bytes_of, payload_of, store, tokens_of

CHUNKS = 12


def saved(pool: kv.Pool, seed: int = 1, chunks: int = CHUNKS) -> kv.KeyChain:
    keys = pool.keys(tokens_of(seed, chunks * pool.layout.chunk_tokens))
    assert store(pool, keys).stored == chunks
    return keys


def in_place(pool: kv.Pool, keys: kv.KeyChain) -> LeasedMemory:
    return pool.leased_memory(pool.acquire(pool.lookup(keys)))


def assert_kv_lies_there(memory: LeasedMemory, keys: kv.KeyChain) -> None:
    for number, address in enumerate(memory.layers.tolist()):
        expected = chunk_bytes_of(keys[number], SMALL.chunk_bytes)
        assert np.array_equal(bytes_at(address, SMALL.chunk_bytes), expected), f"chunk {number}"


@in_both_write_modes
def test_leased_chunks_are_verified_and_read_where_they_lie(module_daemon: Daemon) -> None:
    with module_daemon.connect() as pool:
        keys = saved(pool)
        with in_place(pool, keys) as memory:
            assert memory.chunks == CHUNKS
            assert memory.verify() == kv.LoadResult(CHUNKS, CHUNKS * SMALL.chunk_tokens, "complete")
            assert_kv_lies_there(memory, keys)
            assert memory.summaries.tolist() == [at + SMALL.chunk_bytes for at in memory.layers.tolist()]
            assert memory.are_current() == CHUNKS
            with pytest.raises(kv.InvalidArgument, match="no summaries"):
                memory.good_summaries()
        wait_until(lambda: module_daemon.stats()["leases"] == 0, "closing has released the lease")
        memory.close()
    assert module_daemon.problems() == []


def test_a_chunk_that_was_overwritten_ends_what_is_good(module_daemon: Daemon) -> None:
    with module_daemon.connect() as pool:
        keys = saved(pool, seed=2)
        with in_place(pool, keys) as memory:
            session = memory.lease.session
            assert session is not None
            session.arena.view()[int(memory.lease.rows.offsets[4]) + SMALL.layer_bytes] ^= 1
            result = memory.verify()
            assert (result.chunks, result.reason) == (4, "checksum")
        wait_until(lambda: pool.lookup(keys).chunks == 4, "the daemon has dropped it")


def test_a_lease_is_renewed_until_it_is_closed(start_daemon: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.connection.link.RENEW_FRACTION", 0.02)  # a busy machine may be late with many
    daemon = start_daemon(server__lease_ttl="3s")
    with daemon.connect() as pool, daemon.connect() as other:
        keys = saved(pool)
        memory = in_place(pool, keys)
        lost = other.acquire(other.lookup(keys))
        wait_until(lambda: daemon.stats()["leases"] == 1, "the other lease's time is over")
        assert memory.are_current() == CHUNKS
        memory.close()
        wait_until(lambda: daemon.stats()["leases"] == 0, "it has ended")
        lost.release()


def test_what_was_given_away_is_not_current(module_daemon: Daemon) -> None:
    with module_daemon.connect() as pool, module_daemon.admin() as admin:
        memory = in_place(pool, saved(pool, seed=3))
        memory.lease.release()
        wait_until(lambda: module_daemon.stats()["leases"] == 0, "the lease has ended")
        admin.flush(None, None)
        wait_until(lambda: memory.are_current() == 0, "the slots are free")
        assert memory.verify().chunks == 0
        memory.close()


def _left_behind(daemon: Daemon) -> tuple[kv.KeyChain, LeasedMemory]:
    """Of a daemon that was killed and a Pool that was closed."""
    with daemon.connect() as pool:
        keys = saved(pool)
        memory = in_place(pool, keys)
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client has noticed")
    return keys, memory


def test_memory_stays_mapped_after_the_daemon_and_the_pool(daemon: Daemon) -> None:
    keys, memory = _left_behind(daemon)
    gc.collect()
    assert_kv_lies_there(memory, keys)
    assert memory.are_current() == CHUNKS
    assert memory.verify().reason == "disconnected"
    memory.close()


def test_a_lease_of_a_former_session_disturbs_none_of_the_next(daemon: Daemon) -> None:
    """Numbers of leases begin anew with a daemon's life."""
    with daemon.connect() as pool:
        former = in_place(pool, saved(pool))
        daemon.kill()
        daemon.start()
        wait_connected(pool)
        with in_place(pool, saved(pool)) as memory:
            former.close()
            assert pool._link._leases_in_use == {memory.lease.id: 1}


def test_an_ended_lease_gives_no_memory(module_daemon: Daemon) -> None:
    with module_daemon.connect() as pool:
        lease = pool.acquire(pool.lookup(saved(pool, seed=4)))
        lease.release()
        with contextlib.closing(pool.leased_memory(lease)) as memory:
            assert (memory.chunks, memory.are_current(), len(memory.layers), len(memory.summaries)) == (0, 0, 0, 0)
        nothing = pool.leased_memory(pool.acquire(pool.lookup(pool.keys(tokens_of(9, 64)))))
        assert (nothing.chunks, nothing.verify().reason) == (0, "complete")
        for wrong in (None, "lease"):
            with pytest.raises(kv.InvalidArgument, match="lease is"):
                pool.leased_memory(wrong)  # type: ignore[arg-type]


def test_chunks_from_another_node_are_waited_for(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect() as there, here.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert there.save(keys, from_=payload_of(keys, SMALL)).commit().stored == CHUNKS
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
        with in_place(pool, keys) as memory:
            assert memory.verify(timeout_s=60.0).chunks == CHUNKS
            assert_kv_lies_there(memory, keys)
