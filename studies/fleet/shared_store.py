"""A store that all nodes share: some blocks of any node, the least recently used evicted first. One thread.

It knows no chains; but a request's blocks are published together, its root last, so that it is evicted after its descendants.
To publish what it has is a use: a node that has a block checks whether the store has it.
"""

from collections import OrderedDict
from collections.abc import Sequence


class SharedStore:
    """A store with room for `blocks`."""

    def __init__(self, blocks: int) -> None:
        assert blocks > 0
        self._room = blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def __repr__(self) -> str:
        return f"<SharedStore {len(self._kept)}/{self._room} blocks>"

    def __len__(self) -> int:
        return len(self._kept)

    def count_leading(self, chain: Sequence[int]) -> int:
        """How many of the chain's first blocks it has."""
        return next((depth for depth, block in enumerate(chain) if block not in self._kept), len(chain))

    def publish(self, chain: Sequence[int]) -> int:
        """Store the blocks that it lacks, and use the others; the first ones where not all fit. Returns how many it lacked."""
        fitting = chain[: self._room]
        lacked = sum(block not in self._kept for block in fitting)
        for block in reversed(fitting):
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return lacked
