"""Promises of several connections at once: together they hold no more than the share of all tickets."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import Refused
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.daemon import SMALL
from tests.rigs.parts import served

SESSIONS, CHAIN = 8, 400  # several parts of a request
CAPACITY = SESSIONS * CHAIN * SMALL.chunk_bytes
ZERO_SUM = kvpool_native.crc32c(np.zeros(SMALL.extent_bytes, np.uint8)).to_bytes(
    4, "little"
)  # of chunks that nobody wrote
Check = Callable[[Pool], Awaitable[None]]


def in_pool(check: Check, *options: str) -> None:
    async def run() -> None:
        wanted = [f"dram.capacity={CAPACITY}B", "dram.prefault=false", "server.user_quota=1.0", *options]
        pool = Pool(load_config(None, wanted), MonotonicClock())
        await pool.start()
        await check(pool)
        assert pool.verify()["problems"] == []
        assert await pool.stop()

    asyncio.run(run())


def stored(pool: Pool, number: int) -> bytes:
    """The keys of a chain that is stored."""
    session, keys = pool.open_session(ConnectionId(100 + number), "model", SMALL), keys_of(number * CHAIN, CHAIN)
    made = served(pool.chains.reserve(session, reserve_chain(b"", keys)))
    served(pool.chains.commit(session, m.Commit(made.reservation, ZERO_SUM * SMALL.extents * CHAIN, b"")))
    pool.drop_connection(session.connection)
    return keys


@pytest.mark.parametrize("by_leaf", [False, True])
def test_promises_under_way_at_once_hold_no_more_than_the_share_of_tickets(by_leaf: bool) -> None:
    async def check(pool: Pool) -> None:
        keys = [stored(pool, number) for number in range(SESSIONS)]
        sessions = [pool.open_session(ConnectionId(7 + number), "model", SMALL) for number in range(SESSIONS)]
        named = [column[-KEY_BYTES:] if by_leaf else column for column in keys]
        asked = [
            pool.leases.promise(session, pr.Promise(names, CHAIN, "", 1, 0))
            for session, names in zip(sessions, named, strict=True)
        ]
        if not by_leaf:
            assert [next(parts) for parts in asked] == [None] * SESSIONS, "each has a part"
        answers = [served(parts) for parts in asked]
        given = [answer for answer in answers if answer.chunks]
        assert 0 < sum(answer.chunks for answer in given) <= SESSIONS * CHAIN // 2
        held = sum(use.leased_bytes for use in pool._directory.holders())
        assert held == sum(answer.chunks for answer in given) * SMALL.chunk_bytes
        pool._readers.end_tickets([answer.tickets for answer in given], 1)
        assert pool._directory.holders() == []

    in_pool(check, "dram.connection_quota=0.5")


def test_a_promise_is_no_lease_of_those_that_a_connection_may_have() -> None:
    async def check(pool: Pool) -> None:
        keys = stored(pool, 0)
        session = pool.open_session(ConnectionId(7), "model", SMALL)
        assert served(pool.chains.acquire(session, m.Acquire(keys))).chunks == CHAIN
        with pytest.raises(Refused, match="max_leases = 1"):
            served(pool.chains.acquire(session, m.Acquire(keys)))
        for names in (keys, keys[-KEY_BYTES:]):
            promised = served(pool.leases.promise(session, pr.Promise(names, CHAIN, "", 2, 0)))
            assert promised.chunks == CHAIN
            pool._readers.end_tickets([promised.tickets[:32], promised.tickets[32:]], 1)
        pool.drop_connection(session.connection)

    in_pool(check, "server.max_leases=1", "dram.connection_quota=1.0")
