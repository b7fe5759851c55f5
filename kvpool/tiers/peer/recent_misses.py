"""Recent misses: chunks that a node has just not had, or had with wrong bytes.

A node that was named is not asked again at once for what it did not have: such a miss counts for REMEMBERED_S, what the node
stores meanwhile is known by its hints. A chunk with wrong bytes is the fault of one chunk: for WRONG_S further such ends of it
say nothing about the node. Bounded: beyond MISSES_MAX the oldest is forgotten. Loop thread only.
"""

from collections import OrderedDict

from kvpool.clock import Clock, Deadline

REMEMBERED_S = 0.5
WRONG_S = 600.0
MISSES_MAX = 4096


class RecentMisses:
    """See the module."""

    def __init__(self, clock: Clock, remembered_s: float = REMEMBERED_S) -> None:
        self._clock = clock
        self._remembered_s = remembered_s
        self._until: OrderedDict[tuple[str, bytes], Deadline] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RecentMisses {len(self._until)}>"

    def note_miss(self, node: str, key: bytes) -> None:
        """The node does not have this chunk now, or has it with wrong bytes."""
        self._until.pop((node, key), None)
        self._until[node, key] = Deadline(self._remembered_s, self._clock)
        if len(self._until) > MISSES_MAX:
            self._until.popitem(last=False)

    def has(self, node: str, key: bytes) -> bool:
        """Whether that was so a moment ago."""
        until = self._until.get((node, key))
        if until is not None and until.has_passed():
            del self._until[node, key]
            return False
        return until is not None
