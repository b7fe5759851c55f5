"""Recent nodes: a value for each of the nodes that were remembered last. Loop thread only.

Invariant: it has NODES_MAX nodes at most.
"""

from collections import OrderedDict
from typing import TypeVar

NODES_MAX = 2048

Value = TypeVar("Value")


class RecentNodes(OrderedDict[str, Value]):
    """See the module."""

    def remember(self, node: str, value: Value) -> None:
        """This node's value from now on; beyond NODES_MAX the one that was remembered longest ago is forgotten."""
        self[node] = value
        self.move_to_end(node)
        if len(self) > NODES_MAX:
            self.popitem(last=False)
