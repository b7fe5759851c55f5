"""Prefix tree of computed blocks: full ones by their key, and under each node its children by their tokens.

    root (salt, adapter) ── block 0 ── block 1 ── block 2         a full block: its key names all tokens up to its end
                               │          └────── 5 tokens        a tail: less than a block; only its head is ever copied
                               └── block 1'

A block is in the tree when its KV has been computed, and is never written from then on. `users` of a node are the requests
whose path includes it, so an ancestor has at least the users of its descendants; a node without users is *idle*, and an
idle leaf without a pin is offered for eviction. Only `evict` removes nodes. Keys are those of chunks of one block
(docs/layouts.md), 32 bytes and never shortened: equal keys are equal prefixes. One thread.
"""

from collections.abc import Sequence
from typing import Protocol

from kvpool.states import DEFAULT_PRIORITY
from kvpool_blocks.tree.child_order import ChildOrder
from kvpool_blocks.tree.eviction_order import EvictionOrder
from kvpool_blocks.tree.scope import Scope

NO_BLOCK = -1


class Watcher(Protocol):
    """Notes blocks that come into the tree and leave it; must not wait."""

    def enter(self, node: "Node") -> None:
        """The block is in the tree from now on."""
        ...

    def leave(self, node: "Node") -> None:
        """The block is in the tree no more."""
        ...


class Node:
    """One computed block, or a root, which has none.

    `spares`: equal blocks of users that computed it too, and how many users have each. `depth`: blocks from the root to here.
    `key`: empty for tails. `saved_epoch`: the daemon's life in which the chunk that ends here was stored; `tries`: how often it
    was declined in the life `tried_epoch`, which bounds how often it is offered (`node_link.py`).
    """

    __slots__ = (
        *("key", "block", "parent", "scope", "tokens", "depth", "children", "users", "pins", "spares"),
        *("priority", "duration_ns", "last_use_ns", "stamp", "saved_epoch", "tried_epoch", "tries"),
    )

    def __init__(self, key: bytes, block: int, parent: "Node | Scope", tokens: bytes) -> None:
        """`parent`: of a root, its scope."""
        self.key = key
        self.block = block
        self.parent: Node | None = parent if isinstance(parent, Node) else None
        self.scope: Scope = parent.scope if isinstance(parent, Node) else parent
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if isinstance(parent, Node) else 0
        self.children: ChildOrder[Node] | None = None
        self.users = 0
        self.pins = 0
        self.spares: dict[int, int] | None = None
        self.priority = DEFAULT_PRIORITY
        self.duration_ns = 0
        self.last_use_ns = 0
        self.stamp = 0
        self.saved_epoch = b""
        self.tried_epoch = b""
        self.tries = 0

    def __repr__(self) -> str:
        return f"<Node block {self.block} at depth {self.depth}, {self.users} users>"

    @property
    def is_leaf(self) -> bool:
        """Whether nothing depends on it."""
        return not self.children

    def path(self) -> "list[Node]":
        """The nodes from the first block to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class PrefixTree:
    """See the module. Invariant: `idle` nodes have no users; `_of_block` maps each node's block to it, and no block to two."""

    def __init__(self) -> None:
        self.idle = 0
        self._roots: dict[bytes, Node] = {}
        self._full: dict[bytes, Node] = {}
        self._of_block: dict[int, Node] = {}
        self._order: EvictionOrder[Node] = EvictionOrder()
        self._watcher: Watcher | None = None
        self._every = 1

    def __len__(self) -> int:
        return len(self._of_block)

    def watch(self, every: int, watcher: Watcher) -> None:
        """Have full blocks whose depth is a multiple of `every` be noted by the watcher, from now on."""
        self._every, self._watcher = every, watcher

    def match(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest run of leading keys that are here."""
        found = []
        for key in keys:
            node = self._full.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def root(self, key: bytes, scope: Scope) -> Node:
        """The root with this key."""
        return self._roots.get(key) or Node(key, NO_BLOCK, scope, b"")

    def head(self, parent: Node, wanted: bytes) -> tuple[Node | None, int]:
        """The child of `parent` that shares the longest head with `wanted`, and the number of tokens."""
        return parent.children.longest(wanted) if parent.children is not None else (None, 0)

    def node_of(self, block: int) -> Node | None:
        """The node whose block this is."""
        return self._of_block.get(block)

    def get(self, key: bytes) -> Node | None:
        """The full block with this key."""
        return self._full.get(key)

    def insert(self, parent: Node, block: int, tokens: bytes, key: bytes = b"") -> Node:
        """Add a computed block, without users; with no key, a tail. Requires a parent that is in use, or a root."""
        assert parent.users or parent.parent is None
        assert block not in self._of_block
        if parent.parent is None:
            parent = self._roots.setdefault(parent.key, parent)
        node = Node(key, block, parent, tokens)
        if parent.children is None:
            parent.children = ChildOrder()
        parent.children.add_child(tokens, node)
        if key:
            assert key not in self._full
            self._full[key] = node
            if self._watcher is not None and node.depth % self._every == 0:
                self._watcher.enter(node)
        self._of_block[block] = node
        self.idle += 1
        return node

    def use(self, node: Node) -> None:
        """One more user."""
        if not node.users:
            self.idle -= 1
            self._order.withdraw(node)
        node.users += 1

    def leave(self, node: Node, now_ns: int) -> None:
        """One user less. The last one ends the node's use."""
        assert node.users
        node.users -= 1
        if not node.users:
            self.idle += 1
            node.last_use_ns = now_ns
            self._offer(node)

    def add_spare(self, node: Node, block: int) -> None:
        """A user has an equal block of its own; nothing where it is the node's."""
        if block != node.block:
            node.spares = node.spares or {}
            node.spares[block] = node.spares.get(block, 0) + 1

    def drop_spare(self, node: Node, block: int) -> None:
        """A user leaves that had this block."""
        if node.spares is not None and block in node.spares:
            node.spares[block] -= 1
            if not node.spares[block]:
                del node.spares[block]

    def change_block(self, node: Node) -> int:
        """Have the node take a spare; the block that it had. Requires users, each with a spare, and no pin."""
        assert node.users
        assert not node.pins
        assert node.spares
        spare = next(iter(node.spares))
        del node.spares[spare], self._of_block[node.block]
        block, node.block = node.block, spare
        assert spare not in self._of_block
        self._of_block[spare] = node
        return block

    def use_node(self, node: Node, now_ns: int) -> None:
        """A node that was inserted for nobody is used now, once."""
        node.last_use_ns = now_ns
        self._offer(node)

    def pin(self, node: Node) -> None:
        """Protect a node whose bytes are being read."""
        node.pins += 1
        self._order.withdraw(node)

    def unpin(self, node: Node) -> None:
        """End one protection."""
        assert node.pins
        node.pins -= 1
        self._offer(node)

    def retain(self, node: Node, priority: int, duration_ns: int) -> None:
        """Set the retention of a node. Requires that it is in use, or not offered yet."""
        assert not node.stamp
        node.priority, node.duration_ns = priority, duration_ns

    def victim(self, now_ns: int) -> Node | None:
        """The node to evict next; None where each idle one is pinned, or has descendants that are."""
        return self._order.first(now_ns)

    def evict(self, node: Node) -> int:
        """Remove an idle leaf without pins; the block that it had."""
        assert not node.users
        assert not node.pins
        assert node.is_leaf
        self._order.withdraw(node)
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        parent.children.remove(node.tokens)
        del self._of_block[node.block]
        if node.key:
            del self._full[node.key]
            if self._watcher is not None and node.depth % self._every == 0:
                self._watcher.leave(node)
        block, node.block = node.block, NO_BLOCK
        self.idle -= 1
        if parent.is_leaf and parent.parent is None:
            self._roots.pop(parent.key)
        elif parent.is_leaf:
            self._offer(parent)
        return block

    def blocks(self) -> dict[int, Node]:
        """Every node by its block; for verification."""
        return dict(self._of_block)

    def offered(self) -> list[Node]:
        """Every node that may be evicted now; for verification."""
        return self._order.offered()

    def roots(self) -> list[Node]:
        """Every root; for verification."""
        return list(self._roots.values())

    def _offer(self, node: Node) -> None:
        if not node.users and not node.pins and node.is_leaf and not node.stamp and node.block != NO_BLOCK:
            self._order.offer(node)
