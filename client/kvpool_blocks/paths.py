"""Paths of requests in the prefix tree, and the references that their block tables hold.

Two requests that computed the same prefix at the same time have equal blocks. The tree has one of them; the other request's
path includes that node, which protects its ancestors, and its own block is a *spare* of the node. When no table has the
node's block any more, the node changes to a spare: so a request never keeps more blocks than its own from being evicted.
While the block is being offloaded the change waits.

It takes no blocks and copies none. Engine's thread.
"""

from collections.abc import Iterable

from kvpool.clock import Clock
from kvpool_blocks.references import References
from kvpool_blocks.sequence import Sequence
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree


class Paths:
    """See the module. Invariant: a node in use has a block that some table has, but for those in `_waiting`."""

    def __init__(self, tree: PrefixTree, references: References, clock: Clock) -> None:
        self._tree = tree
        self._references = references
        self._clock = clock
        self._waiting: list[Node] = []

    def parent_of(self, sequence: Sequence) -> Node:
        """The node behind which the sequence's next block belongs."""
        return sequence.path[-1] if sequence.path else self._tree.root(sequence.root_key, sequence.scope)

    def extend(self, sequence: Sequence, node: Node) -> None:
        """The node of the sequence's next full block. Requires that its table has the block."""
        self._tree.use(node)
        self._tree.add_spare(node, sequence.blocks[len(sequence.path)])
        sequence.path.append(node)
        self._check(node)

    def share(self, sequence: Sequence, nodes: Iterable[Node]) -> None:
        """Begin a sequence's table with the blocks of these nodes."""
        for node in nodes:
            self._references.add_reference(node.block)
            sequence.blocks.append(node.block)
            self.extend(sequence, node)

    def cut(self, sequence: Sequence, length: int) -> None:
        """Cut the path to `length` nodes. Requires that the table still has their blocks."""
        now_ns = self._clock.now_ns()
        while len(sequence.path) > length:
            node = sequence.path.pop()
            self._tree.drop_spare(node, sequence.blocks[len(sequence.path)])
            self._tree.leave(node, now_ns)

    def drop_reference(self, block: int) -> None:
        """One table less has the block; it is free where nobody has it. Requires that the table's path was cut before."""
        if self._references.drop(block):
            return
        node = self._tree.node_of(block)
        if node is None:
            self._references.give_back(block)
        else:
            self._check(node)

    def settle_nodes(self) -> None:
        """Change the nodes that wait for it, but those being offloaded."""
        waiting, self._waiting = self._waiting, []
        for node in waiting:
            if not node.users or self._references.count(node.block):
                continue  # it is idle, or a table has its block again
            if node.pins:
                self._waiting.append(node)
            else:
                self._references.give_back(self._tree.change_block(node))

    def _check(self, node: Node) -> None:
        if node.users and not self._references.count(node.block):
            self._waiting.append(node)
            self.settle_nodes()
