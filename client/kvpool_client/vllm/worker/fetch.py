"""Fetch: one load order on one rank.

    ORDERED ──begin_load──► CLAIMED ──finish──► ENDED (LoadOutcome)
        └──cancel, an empty claim──► ENDED with nothing

In every case `finish` gives an outcome, the lease is released, and no byte is written to the blocks afterwards. One thread at a
time, but for `cancel`. Lock: `_lock` guards the load and whether it is wanted; never held across a wait.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from kvpool.clock import NS_PER_S, Clock
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.vllm.plan import LoadOrder, LoadOutcome
from kvpool_client.vllm.worker.divided_time import DividedTime
from kvpool_client.vllm.worker.engine_memory import EngineMemory


class Fetch:
    """See the module."""

    def __init__(self, order: LoadOrder, *, ticket: int, clock: Clock, divided: DividedTime) -> None:
        """`ticket`: the number of the order's ticket that this rank claims. `divided`: of loads from the same tier."""
        self.order = order
        self._ticket = order.tickets[ticket] if ticket < len(order.tickets) else b""
        self._clock = clock
        self._divided = divided
        self._begun_s: float | None = None  # of the divided time, while under way
        self._spent_ns = 0
        self._cost_s = 0.0
        self._lease: Lease | None = None
        self._lock = threading.Lock()
        self._load: Load | None = None  # guarded by _lock
        self._is_wanted = True  # guarded by _lock
        self._waited: set[int] = set()

    def __repr__(self) -> str:
        return f"<Fetch {self.order.request_id} chunks {self.order.first_chunk}..{self.order.chunks}>"

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.order.request_id

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has cancelled it."""
        return self._is_wanted

    def begin_load(self, memory: EngineMemory) -> None:
        """Claim the lease and start copying; returns when the copy runs. With an empty claim there is nothing to wait for."""
        if not self._ticket:
            return
        self._begun_s = self._divided.begin_load()
        with self._spending():
            self._lease = memory.pool.claim(self._ticket)
            if self._lease.chunks != self.order.chunks:
                return
            load = memory.load(self._lease, self.order)
        with self._lock:
            self._load = load
            is_wanted = self._is_wanted
        if not is_wanted:
            load.cancel()

    def wait_layer(self, layer: int) -> bool:
        """Wait until the layer is in place in every block; False where it will not come. REQUIRES: hits may be cut; other
        engines load between steps alone."""
        load = self._load
        self._waited.add(layer)
        with self._spending():
            return load is not None and load.wait_layer(layer) and load.chunks_so_far >= self.order.chunks

    def has_waited_for(self, layers: int) -> bool:
        """Whether every layer has been waited for."""
        return len(self._waited) >= layers

    def cancel(self) -> None:
        """Cancel the load."""
        with self._lock:
            self._is_wanted = False
            load = self._load
        if load is not None:
            load.cancel()

    def finish(self) -> LoadOutcome:
        """Wait until the load has ended, and release the lease. Returns the outcome: a load that may not be cut has brought all
        or nothing."""
        load, wanted = self._load, self.order.chunks
        if load is None:
            chunks, reason = 0, "gone" if self._is_wanted else "cancelled"
        else:
            with self._spending():
                result = load.wait()
            is_usable = self.order.may_be_cut or result.chunks >= wanted
            chunks, reason = result.chunks if is_usable else 0, result.reason
        self.release()
        return LoadOutcome(wanted, chunks, reason, self._spent_ns / NS_PER_S, self.order.tiers, self._cost_s)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Measure the load's time. The forward pass between two layers does not count."""
        begun_ns = self._clock.now_ns()
        try:
            with self._divided.waiting() if self._begun_s is not None else nullcontext():
                yield
        finally:
            self._spent_ns += self._clock.now_ns() - begun_ns

    def release(self) -> None:
        """Release the lease: the load is no longer under way. Idempotent."""
        if self._begun_s is not None:
            self._cost_s, self._begun_s = self._divided.end_load(self._begun_s), None
        if self._lease is not None:
            self._lease.release()

    def blocks_without(self, outcome: LoadOutcome) -> set[int]:
        """The blocks that should have been written and are invalid: the first failed chunk's and all after it. REQUIRES: hits
        may be cut; else a load that fails is reported by its request."""
        block_ids = self.order.block_ids[0]
        chunk_blocks = len(block_ids) // max(1, self.order.chunks - self.order.first_chunk)
        good = max(0, outcome.chunks - self.order.first_chunk) * chunk_blocks
        return {block for block in block_ids[good:] if block >= 0}


def failed(order: LoadOrder, reason: str) -> LoadOutcome:
    """The outcome of an order that was not carried out."""
    return LoadOutcome(order.chunks, 0, reason, 0.0, order.tiers, 0.0)
