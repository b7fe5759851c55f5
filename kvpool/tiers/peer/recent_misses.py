"""Recent misses: which chunks a node that was named has just not had, so that it is not asked for them again at once.

A miss counts for REMEMBERED_S: what the node stores meanwhile is known by its hints. Bounded: beyond MISSES_MAX the oldest is
forgotten. Loop thread only.
"""

from collections import OrderedDict

from kvpool.clock import Clock, Deadline

REMEMBERED_S = 0.5
MISSES_MAX = 4096


class RecentMisses:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: OrderedDict[tuple[str, bytes], Deadline] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RecentMisses {len(self._until)}>"

    def note(self, node: str, key: bytes) -> None:
        """The node does not have this chunk now."""
        self._until.pop((node, key), None)
        self._until[node, key] = Deadline(REMEMBERED_S, self._clock)
        if len(self._until) > MISSES_MAX:
            self._until.popitem(last=False)

    def has(self, node: str, key: bytes) -> bool:
        """Whether the node did not have it a moment ago."""
        until = self._until.get((node, key))
        if until is not None and until.has_passed():
            del self._until[node, key]
            return False
        return until is not None
