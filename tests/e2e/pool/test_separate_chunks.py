"""Chunks without a parent, many at once: found in one lookup, leased in one request and loaded by one job."""

from collections.abc import Sequence

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.connection.session import Session
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, in_both_write_modes, wait_until
from tests.rigs.payload import paged_layers, payload_of, read_chunk
from tests.rigs.prompts import flip, prompt, store

BLOCKS = 2  # of a chunk


def _chains(pool: kv.Pool, seed: int, lengths: Sequence[int]) -> list[kv.KeyChain]:
    return [prompt(pool, seed * 100 + number, length) for number, length in enumerate(lengths)]


def _stored(pool: kv.Pool, seed: int, lengths: Sequence[int]) -> list[kv.KeyChain]:
    chains = _chains(pool, seed, lengths)
    assert [store(pool, keys).stored for keys in chains] == list(lengths)
    return chains


class Engine:
    """Paged KV with room for `chunks` chunks, which go to its last blocks first."""

    def __init__(self, pool: kv.Pool, chunks: int) -> None:
        self.layers = paged_layers(SMALL, chunks * BLOCKS, 16, "kv_first")
        self.cache = pool.register(self.layers, 16, "kv_first")
        self.ids = np.arange(chunks * BLOCKS)[::-1].reshape(chunks, BLOCKS).tolist()

    def blocks(self, lengths: Sequence[int]) -> list[list[int]]:
        """The block ids of leases of so many chunks."""
        rows = iter(self.ids)
        return [[block for _ in range(length) for block in next(rows)] for length in lengths]

    def rows(self, count: int) -> list[bytes]:
        """The bytes of the first chunks."""
        return [read_chunk(self.layers, "kv_first", ids, SMALL).tobytes() for ids in self.ids[:count]]


def _rows_of(chains: Sequence[kv.KeyChain]) -> list[bytes]:
    return [row.tobytes() for keys in chains for row in payload_of(keys, SMALL)]


@in_both_write_modes
def test_chunks_of_many_leases_are_loaded_by_one_load(shared: Shared) -> None:
    lengths = [1, 3, 1, 2]
    with shared.connect() as pool:
        chains = _stored(pool, 1, lengths)
        hits = pool.separate.lookup(chains)
        assert [(hit.chunks, hit.tokens, len(hit.tiers)) for hit in hits] == [
            (1, 32, 1),
            (3, 96, 3),
            (1, 32, 1),
            (2, 64, 2),
        ]
        leases = pool.separate.acquire(hits)
        engine = Engine(pool, 7)
        load = pool.separate.load(leases, engine.cache, engine.blocks(lengths))
        assert set(pool._link._leases_in_use) == {lease.hold.id for lease in leases}
        assert load.wait() == kv.LoadResult(7, 224, "complete")
        assert engine.rows(7) == _rows_of(chains)
        assert pool._link._leases_in_use == {}
        assert (pool.stats()["loads"], pool.stats()["loaded_chunks"], pool.stats()["lookups"]) == (1, 7, 1)
        pool.separate.release(leases)
        assert not any(lease.hold.is_live for lease in leases)


def test_a_lookup_of_many_ends_before_the_first_chain_that_is_not_whole_here(shared: Shared) -> None:
    with shared.connect() as pool:
        chains = _stored(pool, 2, [2, 1])
        cut = prompt(pool, 299, 3)
        assert store(pool, cut, chunks=2).stored == 2
        assert [hit.chunks for hit in pool.separate.lookup([*chains, cut, *chains])] == [2, 1]
        assert pool.separate.lookup([cut, *chains]) == []
        assert pool.separate.lookup([]) == []
        assert (pool.stats()["lookups"], pool.stats()["lookup_hit_chunks"]) == (1, 3), "the others are looked up again"


def test_a_flipped_bit_ends_the_load_and_drops_the_chunk_of_its_own_lease(shared: Shared) -> None:
    lengths = [1, 3, 1]
    with shared.connect() as pool:
        chains = _stored(pool, 3, lengths)
        leases = pool.separate.acquire(pool.separate.lookup(chains))
        flip(leases[1], 1)
        engine = Engine(pool, 5)
        load = pool.separate.load(leases, engine.cache, engine.blocks(lengths))
        assert load.wait() == kv.LoadResult(2, 64, "checksum")
        assert engine.rows(2) == _rows_of(chains)[:2]
        assert [pool.lookup(keys).chunks for keys in chains] == [1, 1, 1]
        pool.separate.release(leases)


def test_a_load_of_many_leases_ends_before_the_first_that_has_no_chunk(shared: Shared) -> None:
    with shared.connect() as pool:
        chains = _stored(pool, 4, [1, 1, 1])
        absent = prompt(pool, 498, 1)
        hits = pool.separate.lookup(chains)
        gone = kv.Hit(1, 32, hits[0].levels, absent)
        leases = pool.separate.acquire([hits[0], gone, hits[1]])
        assert [lease.chunks for lease in leases] == [1, 0, 1]
        engine = Engine(pool, 3)
        assert pool.separate.load(leases, engine.cache, engine.blocks([1, 1, 1])).wait() == kv.LoadResult(
            1, 32, "complete"
        )
        assert engine.rows(3) == [*_rows_of(chains[:1]), bytes(SMALL.chunk_bytes), bytes(SMALL.chunk_bytes)]
        nothing = pool.separate.load(leases[1:], engine.cache, engine.blocks([1, 1]))
        assert nothing.wait() == kv.LoadResult(0, 0, "complete")
        pool.separate.release(leases)


def test_leases_of_an_earlier_connection_are_not_joined_with_those_of_this_one(shared: Shared) -> None:
    with shared.connect() as pool:
        chains = _stored(pool, 5, [1, 1])
        (earlier,) = pool.separate.acquire(pool.separate.lookup(chains[:1]))
        session: Session | None = pool._link.session
        assert session is not None
        session.end_session("ended by the test")
        wait_until(lambda: pool.connected and pool._link.session is not session, "the pool is connected again")
        (later,) = pool.separate.acquire(pool.separate.lookup(chains[1:]))
        engine = Engine(pool, 2)
        load = pool.separate.load([later, earlier], engine.cache, engine.blocks([1, 1]))
        assert load.wait() == kv.LoadResult(1, 32, "complete")
        assert pool.separate.load([earlier, later], engine.cache, engine.blocks([1, 1])).wait().reason == "disconnected"
        pool.separate.release([earlier, later])


@pytest.mark.parametrize("ended", [0, 1])
def test_the_release_of_each_lease_waits_for_the_load_of_them_all(shared: Shared, ended: int) -> None:
    with shared.connect() as pool:
        leases = pool.separate.acquire(pool.separate.lookup(_stored(pool, 6 + 10 * ended, [1, 1])))
        engine = Engine(pool, 2)
        load = pool.separate.load(leases, engine.cache, engine.blocks([1, 1]))
        leases[ended].release()
        assert repr(load) == "<Load 2 chunks, complete>"
        again = pool.separate.load(leases, engine.cache, engine.blocks([1, 1]))
        assert again.wait() == kv.LoadResult(0, 0, "gone")
        pool.separate.release(leases)


def test_a_load_of_no_lease_or_of_another_pools_is_refused(shared: Shared) -> None:
    with shared.connect() as pool, shared.connect(model="another") as other:
        (lease,) = pool.separate.acquire(pool.separate.lookup(_stored(pool, 7, [1])))
        engine = Engine(pool, 1)
        with pytest.raises(kv.InvalidArgument, match="leases are none"):
            pool.separate.load([], engine.cache, [])
        with pytest.raises(kv.InvalidArgument, match="lease is of the Pool of"):
            other.separate.load([lease], engine.cache, engine.blocks([1]))
        with pytest.raises(kv.InvalidArgument, match="block_ids"):
            pool.separate.load([lease], engine.cache, [[0]])
        with pytest.raises(kv.InvalidArgument, match="keys are of the Pool of"):
            other.separate.lookup(_chains(pool, 7, [1]))
        pool.separate.release([lease])


@in_both_write_modes
def test_a_chain_of_no_chunks_is_saved_as_nothing_beside_others(shared: Shared) -> None:
    lengths = [0, 2, 0]
    with shared.connect() as pool:
        chains, engine = _chains(pool, 20, lengths), Engine(pool, 2)
        for chosen in ([0], [0, 1, 2]):
            saves = pool.separate.save(
                [chains[number] for number in chosen],
                engine.cache,
                engine.blocks([lengths[number] for number in chosen]),
                [()] * len(chosen),
            )
            results = pool.separate.publish(saves)
            assert [result.stored for result in results] == [lengths[number] for number in chosen]
        assert pool.stats()["reconnects"] == 0
        assert [hit.chunks for hit in pool.separate.lookup([chains[1]])] == [2]
