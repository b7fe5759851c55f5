"""Lease size: how many chunks of a set an adapter leases at once, and whether those that a lease left out are asked for again.

A lease brings to DRAM what the tiers below have, before it is answered, and holds it there. So it may be too large: for a small
DRAM, of which other leases hold a part, it leaves chunks out; from a slow disk it is late, and the connection ends with it.
Either makes the next ones smaller, and quick ones make them larger again. What other nodes have is not asked for again. Any
thread: of two that change the size at once one is heard.
"""

from threading import Event

import numpy as np
import numpy.typing as npt

from kvpool.clock import NS_PER_S, Deadline, MonotonicClock
from kvpool.layout import Layout
from kvpool.states import PEER
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease

CHUNKS_AT_ONCE = 64
# Bytes of them: of large chunks so few that a slow disk has them in a second, and a small pool room for a save (guess).
BYTES_AT_ONCE = 256 << 20
# By how much a lease that was too large makes the next one smaller; within a few of them one chunk is left.
SHRINKS_BY = 4
# How often a chunk is asked for: as often as sizes shrink to 1, and then some.
ASKED_MAX = 8
# The part of a Pool's timeout above which a lease is too large: one twice as large still ends within the timeout.
LONG = 0.5
_PAUSE_S = 0.005


def chunks_at_once(layout: Layout, most: int) -> int:
    """How many chunks of a layout are moved in one request, at most so many: of large ones so few that they find room."""
    return max(1, min(most, BYTES_AT_ONCE // layout.chunk_bytes))


class LeaseSize:
    """See the module. `count`: chunks of the next lease."""

    def __init__(self, pool: Pool, *, timeout_s: float) -> None:
        """`timeout_s`: the Pool's."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._most = chunks_at_once(pool.layout, CHUNKS_AT_ONCE)
        self.count = self._most

    def __repr__(self) -> str:
        return f"<LeaseSize {self.count} chunks>"

    def acquire_set(self, names: Names) -> Lease:
        """See the Pool's. `count` of them at most."""
        began_ns = MonotonicClock.now_ns()
        lease = self._pool.acquire_set(names)
        took_s = (MonotonicClock.now_ns() - began_ns) / NS_PER_S
        if lease.chunks < len(names) or took_s > self._timeout_s * LONG:
            self.count = max(1, len(names) // SHRINKS_BY)
        else:
            self.count = min(self._most, max(self.count, 2 * len(names)))
        return lease

    def levels_again(self, names: Names, deadline: Deadline, stop: Event) -> npt.NDArray[np.uint8]:
        """The levels of what a lease left out; 0 where it is not to be asked for again. Waits for a connection that a late
        answer has ended: until `stop` or the deadline, and the Pool's timeout at most."""
        reconnecting = Deadline(min(self._timeout_s, deadline.remaining_s()))
        while not (self._pool.connected or reconnecting.has_passed() or stop.wait(_PAUSE_S)):
            pass
        levels = self._pool.probe(names)
        return np.where(levels < PEER, levels, 0)
