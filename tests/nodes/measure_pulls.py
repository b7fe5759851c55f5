"""Measure leases of what another node has: `python -m tests.nodes.measure_pulls [rounds]`.

Two pools of one process on loopback, chunks of 4 KiB, so that requests and slots are measured and not bytes. For each number of
ranks and chunks: the time until the lease is granted, its longest turn of the loop, how many chunks are leased and land, the
time until all have landed, and the pulls. Floor: the same lease when the chunks are here.
"""

import asyncio
import statistics
import sys
import time
from dataclasses import replace

from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.protocol.records import messages as m
from tests.rigs.nodes.fleet import Node
from tests.rigs.tiers.tiered_pool import LAYOUT, key_of

SIZES = ((8, 512), (8, 64), (1, 4096), (1, 16_384))
ROUNDS = 5


async def lease(node: Node, session: EngineSession, packed: bytes) -> tuple[m.Leased, float, float]:
    """A lease, the seconds that it took, and those of its longest turn."""
    parts, begun, longest = node.pool.pool.chains.acquire(session, m.Acquire(packed)), time.perf_counter(), 0.0
    while True:
        turn = time.perf_counter()
        try:
            awaited = next(parts)
        except StopIteration as end:
            longest = max(longest, time.perf_counter() - turn)
            return end.value, time.perf_counter() - begun, longest
        longest = max(longest, time.perf_counter() - turn)
        await (asyncio.sleep(0) if awaited is None else awaited)


async def measure(ranks: int, chunks: int) -> dict[str, float]:
    """One round."""
    here, there = Node("here", 2 * ranks * chunks), Node("there", 2 * ranks * chunks)
    await there.start()
    await here.start()
    await here.join(there)
    columns = [[key_of(rank, number) for number in range(chunks)] for rank in range(ranks)]
    for rank, keys in enumerate(columns):
        layout = replace(LAYOUT, rank=rank, world=ranks)
        there.pool.session = there.pool.pool.open_session(ConnectionId(20 + rank), "model", layout)
        assert await there.pool.save(keys) == chunks
        here.believe(there, keys)
    session = here.pool.pool.open_session(ConnectionId(30), "model", replace(LAYOUT, rank=None, world=ranks))
    packed = b"".join(key for keys in columns for key in keys)
    begun = time.perf_counter()
    leased, seconds, longest = await lease(here, session, packed)
    await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
    landed_s = time.perf_counter() - begun
    stats = here.pool.pool.measure({}).tiers["peer"]
    here.pool.pool.leases.release(session, leased.lease)
    again, floor_s, _ = await lease(here, session, packed)
    here.pool.pool.leases.release(session, again.lease)
    here.pool.pool.drop_connection(session.connection)
    for rank in range(ranks):
        there.pool.pool.drop_connection(ConnectionId(20 + rank))
    there.pool.session = there.pool.pool.open_session(ConnectionId(99), "model", LAYOUT)
    await here.stop()
    await there.stop()
    return {
        "lease ms": seconds * 1e3,
        "longest turn ms": longest * 1e3,
        "leased": leased.chunks,
        "landed": int(stats["peer.pulled_chunks"]) / ranks,
        "landed ms": landed_s * 1e3,
        "pulls": there.server.counts["pulls"],
        "floor ms": floor_s * 1e3,
    }


def main() -> None:
    """Print a row for each size: medians, and the least and the most."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    for ranks, chunks in SIZES:
        found = [asyncio.run(measure(ranks, chunks)) for _ in range(rounds)]
        cells = []
        for name in found[0]:
            values = [one[name] for one in found]
            cells.append(f"{name} {statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})")
        print(f"{ranks} ranks, {chunks} chunks: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
