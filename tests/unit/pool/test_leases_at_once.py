"""Leases that are granted with one call: of chains that DRAM has, as a lease that is taken part by part would have them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import Refused
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.parts import PART_CHUNKS
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.daemon import SMALL
from tests.rigs.parts import served

CHAIN = 2 * PART_CHUNKS
KEYS = keys_of(0, CHAIN)
LEAF = KEYS[-KEY_BYTES:]
PART = KEYS[: PART_CHUNKS * KEY_BYTES]
ZERO_SUM = kvpool_native.crc32c(np.zeros(SMALL.extent_bytes, np.uint8)).to_bytes(4, "little")  # of what nobody wrote


def in_pool(check: Callable[[Pool], Awaitable[None]], *options: str) -> None:
    async def run() -> None:
        wanted = [f"dram.capacity={2 * CHAIN * SMALL.chunk_bytes}B", "dram.prefault=false", *options]
        pool = Pool(load_config(None, wanted), MonotonicClock())
        await pool.start()
        writer = pool.open_session(ConnectionId(9), "model", SMALL)
        made = served(pool.chains.reserve(writer, reserve_chain(b"", KEYS)))
        served(pool.chains.commit(writer, m.Commit(made.reservation, ZERO_SUM * SMALL.extents * CHAIN, b"")))
        pool.drop_connection(writer.connection)
        await check(pool)
        assert pool.verify()["problems"] == []
        await pool.stop()

    asyncio.run(run())


ALL = ("dram.connection_quota=1.0", "server.user_quota=1.0")


def test_a_leaf_gets_the_columns_that_all_keys_get() -> None:
    async def check(pool: Pool) -> None:
        readers, session = pool.chains.readers, pool.open_session(ConnectionId(1), "model", SMALL)
        in_parts = served(pool.chains.acquire(session, m.Acquire(KEYS)))
        granted = readers.lease_at_once(session, m.Acquire(LEAF, CHAIN), 0)
        assert granted is not None
        lease, at_once = granted
        assert lease.held == CHAIN == at_once.chunks
        assert (at_once.offsets, at_once.generations) == (in_parts.offsets, in_parts.generations)
        assert (at_once.tiers, at_once.slots) == (in_parts.tiers, in_parts.slots)
        assert pool.measure({}).directory["held"] == CHAIN
        readers.release_each(session, [lease.id, in_parts.lease], 0)
        assert pool.measure({}).directory["held"] == 0

    in_pool(check, *ALL)


def test_a_chain_of_one_part_may_be_named_by_all_keys() -> None:
    async def check(pool: Pool) -> None:
        readers, session = pool.chains.readers, pool.open_session(ConnectionId(1), "model", SMALL)
        for keys, chunks in ((PART, 0), (PART, PART_CHUNKS)):
            granted = readers.lease_at_once(session, m.Acquire(keys, chunks), 0)
            assert granted is not None
            assert granted[1].chunks == len(keys) // KEY_BYTES == granted[0].chunks

    in_pool(check, *ALL)


@pytest.mark.parametrize(
    ("keys", "chunks"),
    [
        (KEYS, CHAIN),  # more than a part
        (PART, PART_CHUNKS + 1),  # neither all keys nor a leaf
        (PART[:-1], 0),  # no whole keys
        (b"", 0),
        (b"", 1),
        (LEAF, -1),
        (LEAF, CHAIN - 1),  # another length than the chain has
        (LEAF, m.LEAF_CHUNKS_MAX + 1),
        (keys_of(5000, 1), 1),  # not stored
        (LEAF + keys_of(5000, 1), 2),
    ],
)
def test_what_is_not_one_stored_chain_is_left_to_be_looked_at(keys: bytes, chunks: int) -> None:
    async def check(pool: Pool) -> None:
        session = pool.open_session(ConnectionId(1), "model", SMALL)
        assert pool.chains.readers.lease_at_once(session, m.Acquire(keys, chunks), 0) is None
        assert pool.measure({}).directory["holds"] == 0

    in_pool(check, *ALL)


def test_nothing_is_leased_beyond_a_connections_share() -> None:
    async def check(pool: Pool) -> None:
        session = pool.open_session(ConnectionId(1), "model", SMALL)
        pool._directory.share_among_holders(0.25, 1.0)
        assert pool.chains.readers.lease_at_once(session, m.Acquire(LEAF, CHAIN), 0) is None
        assert served(pool.chains.acquire(session, m.Acquire(LEAF, CHAIN))).lease == 0
        assert 0 < served(pool.chains.acquire(session, m.Acquire(KEYS))).chunks < CHAIN

    in_pool(check, *ALL)


def test_what_is_refused_at_once_has_used_nothing() -> None:
    async def check(pool: Pool) -> None:
        session = pool.open_session(ConnectionId(1), "model", SMALL)
        pool._directory.share_among_holders(0.25, 1.0)
        before = pool._directory.stats()
        assert pool.chains.readers.lease_at_once(session, m.Acquire(LEAF, CHAIN), 0) is None
        after = pool._directory.stats()
        assert after["reuse_gaps"] == before["reuse_gaps"]
        assert after["policy_learned_uses"] == before["policy_learned_uses"]

    in_pool(check, *ALL)


def test_what_a_connection_holds_already_takes_nothing_of_its_share() -> None:
    async def check(pool: Pool) -> None:
        readers, session = pool.chains.readers, pool.open_session(ConnectionId(1), "model", SMALL)
        pool._directory.share_among_holders(0.5, 1.0)
        for _ in range(3):
            assert readers.lease_at_once(session, m.Acquire(LEAF, CHAIN), 0) is not None
        other = pool.open_session(ConnectionId(2), "model", SMALL)
        assert readers.lease_at_once(other, m.Acquire(LEAF, CHAIN), 0) is None, (
            "half of what is left is less than all of this"
        )

    in_pool(check, *ALL)


def test_a_scheduler_gets_the_levels_alone_and_a_connection_no_more_leases_than_it_may() -> None:
    async def check(pool: Pool) -> None:
        session = pool.open_session(ConnectionId(1), "model", replace(SMALL, rank=None))
        leased = served(pool.chains.acquire(session, m.Acquire(LEAF, CHAIN)))
        assert (leased.chunks, len(leased.tiers)) == (CHAIN, CHAIN)
        assert (leased.offsets, leased.generations, leased.slots) == (b"", b"", b"")
        with pytest.raises(Refused):
            served(pool.chains.acquire(session, m.Acquire(LEAF, CHAIN)))
        other = pool.open_session(ConnectionId(2), "other model", SMALL)
        assert served(pool.chains.acquire(other, m.Acquire(LEAF, CHAIN))).lease == 0, "the chunks of another namespace"

    in_pool(check, *ALL, "server.max_leases=1")
