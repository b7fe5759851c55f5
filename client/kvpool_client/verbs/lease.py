"""Lease on chunks: while it lives they can be loaded. One holds a hit's chunks of every group of the layout.

A Lease belongs to the session it was acquired in. It ends when it is released, when that session ends (then it holds
nothing: loads of it answer `disconnected`), or in the daemon when it has not been used for its time to live. Releasing waits
for running loads. One that is collected before is released by the Pool, with a ResourceWarning, and its loads are cancelled.
`Lease` is what a caller has, `LeaseHold` what the Pool's other parts and its loads have. Any thread. Lock: `_lock` guards
`_loads` and `_is_released`, never held across a wait or request.
"""

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from kvpool_client.connection.link import RENEW_FRACTION
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.leased_rows import LeasedRows, chunk_ranges, levels_by_chunk

if TYPE_CHECKING:
    from kvpool_client.verbs.load import Load


class Lease:
    """A right to load `chunks` leading chunks of a prompt, `tokens` tokens, until it is released.

        with pool.acquire(pool.lookup(keys)) as lease:        # or pool.claim(ticket)
            result = pool.load(lease, cache, block_ids).wait()

    `Pool.acquire` and `Pool.claim` answer it; an empty one (0 chunks) where nothing was there any more, or the daemon is away.
    Leaving it as a context releases it. It ends too when the connection ends, and in the daemon when it has not been used for
    `server.lease_ttl`: then loads answer `disconnected` or `gone`, and nothing raises. `Pool.acquire_set` answers one on chunks
    that are each alone: `held` names them. One that is collected before it is released ends with its loads, and a
    ResourceWarning. Threads: any.
    """

    def __init__(self, hold: "LeaseHold", *, estimate_s: Callable[[int], float], peer_pace: PeerPace) -> None:
        """`Pool.acquire` and `Pool.claim` make it. `estimate_s`: how long so many chunks take to copy. `peer_pace`: of the node
        from which some of them come."""
        self.hold = hold
        self.namespace = hold.namespace
        self.chunks = hold.chunks
        self.tokens = hold.tokens
        self._estimate_s = estimate_s
        self._peer_pace = peer_pace

    def __repr__(self) -> str:
        return repr(self.hold)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def cost_s(self) -> float:
        """Estimated seconds to load all of it, from what this Pool has copied so far, and from what was measured of the node
        from which some of it comes. Compare it with the time to compute `tokens` tokens."""
        sizes = [part.stored_bytes for part in self.hold.layout.group_layouts]
        is_elsewhere = np.frombuffer(self.hold.row_tiers, np.uint8) >= Level.PEER
        elsewhere = np.repeat(sizes, [len(chunks) for chunks in self.ranges])[is_elsewhere]
        return self._estimate_s(self.chunks) + self._peer_pace.cost_s(int(elsewhere.sum()))

    @property
    def tiers(self) -> npt.NDArray[np.uint8]:
        """The level of each chunk when it was leased, uint8 [chunks]: a `kvpool_client.Level`; the slowest of its groups'."""
        return self.hold.tiers

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Of a set whether each of its keys is leased, bool [keys]; of a hit all of its chunks are."""
        return self.hold.held

    @property
    def ranges(self) -> tuple[range, ...]:
        """The chunk numbers of each group of the layout that a load needs: of a full group all, of windows and states the last
        ones. A plain layout has one."""
        return self.hold.ranges

    def release(self) -> None:
        """Wait for the loads that run, then end the lease. Idempotent; never raises. In a forked child the lease is the
        parent's."""
        self.hold.release()

    def ticket(self, claims: int | None = None) -> bytes:
        """A ticket that another process of the trust domain turns into a lease, once on each rank of the layout; empty if this
        lease has ended, or is of a set.

        `claims`: how often it may be claimed instead, by whatever ranks: by those of an engine of which each has a share of one
        layout. It lasts until then, or as long as a lease that is not used. Raises InvalidArgument for another number than
        1 to 1024.
        """
        if claims is not None and (
            isinstance(claims, bool) or not isinstance(claims, int) or not 0 < claims <= m.CLAIMS_MAX
        ):
            raise InvalidArgument(f"claims is {claims!r}, expected 1..{m.CLAIMS_MAX}")
        session = self.hold.session
        if not self.hold.is_live or session is None:
            return b""
        try:
            return session.call(m.IssueTicket(self.hold.id, claims or 0), m.Ticket).ticket
        except KVPoolError:
            return b""


class LeaseHold:
    """A lease as the Pool's parts see it: where its chunks lie, and the loads for which its end waits."""

    def __init__(self, session: Session | None, leased: m.Leased, *, namespace: Namespace, asked_ns: int) -> None:
        """`namespace`: that of the Pool whose verbs take it. `asked_ns`: when the daemon was asked for it, by MonotonicClock:
        the lease's time begins while the answer is on its way."""
        self.session = session
        self.id = leased.lease
        self.namespace = namespace
        self.layout = namespace.layout
        self.chunks = leased.chunks
        self.tokens = leased.chunks * self.layout.chunk_tokens
        self.leased = leased
        self.asked_ns = asked_ns
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loads: set[Load] = set()  # guarded by _lock
        self._is_released = session is None  # guarded by _lock

    def __repr__(self) -> str:
        state = "released" if self._is_released else "live" if self.is_live else "ended"
        return f"<Lease {self.id} {state}, {self.chunks} chunks>"

    def __del__(self) -> None:
        # A finalizer, also of an interpreter that ends: see `endings`. Its loads are forgotten with it, or they would have it.
        if self._is_released or self.session is None or os.getpid() != self._pid or sys.is_finalizing():
            return
        if self.session.is_alive:
            self.session.endings.add_forgotten(
                "never released; it is released now, its loads are cancelled", self, self._drop
            )
        elif self._loads:
            self.session.endings.add_end(self._drop)

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Which of the chunks that were named it has."""
        return np.ones(self.chunks, np.bool_)

    @property
    def ranges(self) -> tuple[range, ...]:
        """The chunks of each group, of which the rows are, in this order."""
        return chunk_ranges(self.layout, self.chunks)

    @property
    def row_tiers(self) -> bytes:
        """The level of each row."""
        return self.leased.tiers

    @property
    def tiers(self) -> npt.NDArray[np.uint8]:
        """The level of each chunk when it was leased."""
        return levels_by_chunk(self.layout, self.chunks, self.leased.tiers)

    @property
    def renewal(self) -> Deadline:
        """When a load that uses it has it renewed first. REQUIRES: it has a session."""
        assert self.session is not None
        return Deadline(self.session.welcome.lease_ttl_s * RENEW_FRACTION, since_ns=self.asked_ns)

    @property
    def rows(self) -> LeasedRows:
        """All rows, of one group after the other."""
        return LeasedRows.of(self.leased, range(len(self.leased.tiers)))

    def rows_from(self, first_chunk: int) -> list[LeasedRows]:
        """The rows of each group that a load from a chunk on needs: of windows and states all."""
        found, end = [], 0
        for part in self.layout.group_layouts:
            first = end + first_chunk if part.is_chained else end
            end += part.chunks_of(self.chunks)
            found.append(LeasedRows.of(self.leased, range(first, end)))
        return found

    @property
    def is_live(self) -> bool:
        """Whether its session lives and it was not released. Its time to live is checked by the daemon alone."""
        return not self._is_released and self.session is not None and self.session.is_alive

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lease: nothing copies there."""
        return os.getpid() != self._pid

    @property
    def is_released(self) -> bool:
        """Whether it was released, or never held anything."""
        return self._is_released

    def release(self) -> None:
        """Wait for running loads, then end the lease. Idempotent; never raises. In a forked child the lease is the parent's."""
        if self.end_loads():
            assert self.session is not None
            self.session.drop_leases([self.id])

    def end_loads(self) -> bool:
        """Wait for running loads and begin no new ones. True, once: the caller has the daemon end the lease."""
        if os.getpid() != self._pid:
            self._is_released = True
            return False
        with self._lock:
            if self._is_released:
                return False
            self._is_released = True
            loads = list(self._loads)
        if loads:
            for load, stall in [(load, load.watch()) for load in loads]:
                load.wait_watched(stall)
        return True

    def _drop(self) -> None:
        """End it with its loads: nobody waits for them."""
        with self._lock:
            loads = list(self._loads)
        for load in loads:
            load.cancel()
        self.release()

    def begin_load(self, load: "Load") -> bool:
        """Have `release` wait for this load. False when the lease has been released."""
        with self._lock:
            if self._is_released:
                return False
            self._loads.add(load)
            return True

    def end_load(self, load: "Load") -> None:
        """The load has ended."""
        with self._lock:
            self._loads.discard(load)
