"""Doubts: chunks of this node that came to another one with wrong bytes, and are compared here with their checksums.

Bytes may have changed on the way; those that have changed here are dropped, so that nobody is offered them again. What is bad
is found by reading, never believed: another node can have nothing dropped that is whole. It costs reads, CHUNKS_PER_S of them
at most for all other nodes, one at a time; what exceeds that is not compared, and will be reported again.

Loop thread only; the bytes are read by the transfer threads.
"""

import asyncio
import logging

from kvpool.clock import Clock
from kvpool.errors import KVPoolError
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.log_pace import LogPace
from kvpool.peers.control import records as r
from kvpool.peers.token_bucket import TokenBucket
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.server.peers.puller_connections import PullerConnection, PullerConnections

log = logging.getLogger(__name__)

CHUNKS_PER_S = 16


class Doubts:
    """See the module. `compared`: chunks, from the start on."""

    def __init__(self, pool: Pool, connections: PullerConnections, clock: Clock) -> None:
        self._pool = pool
        self._connections = connections
        self._rate = TokenBucket(CHUNKS_PER_S, CHUNKS_PER_S, clock)
        self._failures = LogPace(clock)
        self._comparing: asyncio.Task[None] | None = None
        self.compared = 0

    def __repr__(self) -> str:
        return f"<Doubts {self.compared} chunks compared>"

    def compare_chunk(self, connection: PullerConnection, wrong: r.Wrong) -> None:
        """Compare a chunk, unless another one is being compared, or too many were just now."""
        if self._comparing is not None or not self._rate.take_tokens():
            return
        session = self._connections.begin_use(connection, wrong)
        if session is not None:
            self._comparing = asyncio.get_running_loop().create_task(self._compare(connection, session, wrong))

    async def close(self) -> None:
        """Compare nothing any more."""
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.wait([self._comparing])

    async def _compare(self, connection: PullerConnection, session: EngineSession, wrong: r.Wrong) -> None:
        keys, has_parent = KeyColumn(wrong.parent + wrong.key), bool(wrong.parent)
        try:
            leased = await _taken_in_parts(self._pool.chains.acquire_for_peer(session, keys, int(has_parent)))
            if leased.lease:
                self.compared += 1
                await self._pool.leases.check_reported(session, m.ReportCorrupt(leased.lease, 0))
                self._pool.leases.release(session, leased.lease)
        except KVPoolError as error:
            if (end := self._failures.take_line()) is not None:
                name = connection.name
                log.info("peer %s has received wrong bytes, and the chunk was not compared: %s%s", name, error, end)
        finally:
            self._comparing = None
            self._connections.end_use(connection, session)
            self._connections.drop_where_over(connection.number)


async def _taken_in_parts(parts: Parts[m.Leased]) -> m.Leased:
    """The answer to a request that is served in parts; other work goes on between them."""
    while True:
        try:
            awaited = next(parts)
        except StopIteration as end:
            leased: m.Leased = end.value
            return leased
        await (asyncio.sleep(0) if awaited is None else awaited)
