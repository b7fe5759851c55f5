"""Order in which idle blocks are evicted: lower priority first, among equals the one used longest ago.

A priority with a duration falls back to the default when it has not been used for so long (docs/events.md). An entry is
valid while its node carries its stamp: a node that is withdrawn leaves a dead entry behind, and the heap is built anew
before dead entries outnumber live ones. The tree offers leaves alone, which is how leaves go before parents. One thread; no
clock: now is an argument.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from kvpool.states import DEFAULT_PRIORITY

DEAD_ENTRIES_MIN = 64


class Offered(Protocol):
    """What the order reads of a node, and the two fields that it writes."""

    priority: int
    duration_ns: int
    last_use_ns: int
    stamp: int


N = TypeVar("N", bound=Offered)


class EvictionOrder(Generic[N]):
    """Offered nodes. Invariant: `_count` heap entries are valid, and so many nodes have a stamp other than 0."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, N]] = []
        self._expiries: list[tuple[int, int, N]] = []
        self._count = 0
        self._last_stamp = 0

    def __len__(self) -> int:
        return self._count

    def offer(self, node: N) -> None:
        """Let the node be evicted. Requires that it is not offered."""
        assert not node.stamp
        self._last_stamp += 1
        node.stamp = self._last_stamp
        self._count += 1
        heappush(self._heap, (node.priority, node.last_use_ns, node.stamp, node))
        if node.duration_ns:
            heappush(self._expiries, (node.last_use_ns + node.duration_ns, node.stamp, node))
        self._drop_dead()

    def withdraw(self, node: N) -> None:
        """Do not evict the node. Nothing where it is not offered."""
        if node.stamp:
            node.stamp = 0
            self._count -= 1

    def first(self, now_ns: int) -> N | None:
        """The node to evict next; it stays offered. None where none is."""
        self._expire(now_ns)
        while self._heap:
            _, _, stamp, node = self._heap[0]
            if node.stamp == stamp:
                return node
            heappop(self._heap)
        return None

    def offered(self) -> list[N]:
        """All offered nodes, in no order; for verification."""
        return [node for _, _, stamp, node in self._heap if node.stamp == stamp]

    def _expire(self, now_ns: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, stamp, node = heappop(self._expiries)
            if node.stamp == stamp:
                self.withdraw(node)
                node.priority, node.duration_ns = DEFAULT_PRIORITY, 0
                self.offer(node)

    def _drop_dead(self) -> None:
        if len(self._heap) > 2 * self._count + DEAD_ENTRIES_MIN:
            self._heap = [entry for entry in self._heap if entry[3].stamp == entry[2]]
            heapify(self._heap)
        if len(self._expiries) > 2 * self._count + DEAD_ENTRIES_MIN:
            self._expiries = [entry for entry in self._expiries if entry[2].stamp == entry[1]]
            heapify(self._expiries)
