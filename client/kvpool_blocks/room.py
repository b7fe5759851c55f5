"""Room: blocks for requests, made by evicting idle blocks of the prefix tree, each saved to the node's pool before.

A block that the node's pool has, or has declined, is dropped at once. For others an offload begins, which pins them, and
others are looked for; when none is left one call waits `wait_s` at most for offloads to end, and then drops blocks that are
not saved: a step is never held up longer by a slow daemon. Engine's thread.
"""

from kvpool.clock import Clock, Deadline
from kvpool_blocks.node_link import NodeLink
from kvpool_blocks.references import References
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree


class Room:
    """See the module."""

    def __init__(
        self, references: References, tree: PrefixTree, link: NodeLink, *, clock: Clock, wait_s: float
    ) -> None:
        self._references = references
        self._tree = tree
        self._link = link
        self._clock = clock
        self._wait_s = wait_s
        self.counts = dict.fromkeys(("evicted_blocks", "dropped_unsaved", "refused"), 0)

    @property
    def blocks(self) -> int:
        """Blocks that no request uses: free ones, and idle ones of the prefix tree."""
        return self._references.free_count + self._tree.idle

    def take_blocks(self, count: int) -> list[int] | None:
        """So many blocks, each in one table from now on; None where there is no room now."""
        deadline: Deadline | None = None
        while count <= self.blocks and self._references.free_count < count:
            node = self._tree.victim(self._clock.now_ns())
            if node is not None and not self._link.is_worth_saving(node):
                self._evict(node)
                continue
            deadline = deadline or Deadline(self._wait_s)
            if node is not None and not deadline.has_passed() and self._link.offload(node):
                continue
            if self._link.wait(deadline):
                continue
            if node is None:
                break
            self.counts["dropped_unsaved"] += 1
            self._evict(node)
        if self._references.free_count < count:
            self.counts["refused"] += 1
            return None
        return self._references.take_blocks(count)

    def _evict(self, node: Node) -> None:
        self._references.give_back(self._tree.evict(node))
        self.counts["evicted_blocks"] += 1
