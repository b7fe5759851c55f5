"""Recount of a block pool: references, users, pins and keys, computed anew from the block tables and the tree.

It changes nothing, and costs as much as there are blocks. Engine's thread.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Items

import numpy as np

import kvpool_native
from kvpool_blocks.references import References
from kvpool_blocks.sequence import Sequence
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree


def recount(
    sequences: Mapping[Hashable, Sequence],
    tree: PrefixTree,
    references: References,
    *,
    pins: Items[Node],
    size: int,
) -> list[str]:
    """Problems; empty if all is well. `pins`: nodes being offloaded; `size`: tokens in a block."""
    nodes = tree.blocks()
    tables = Counter(block for sequence in sequences.values() for block in sequence.blocks)
    problems = _of_blocks(tables, nodes, references)
    users = Counter(node for sequence in sequences.values() for node in sequence.path)
    pinned = Counter(pins)
    for block, node in nodes.items():
        if node.block != block or node.users != users[node] or node.pins != pinned[node]:
            problems.append(
                f"{node!r} is of block {block} and counts {node.users} users and {node.pins} pins, "
                f"expected {users[node]} and {pinned[node]}"
            )
        if node.users and not tables[block] and not node.pins:
            problems.append(f"{node!r} is used and no table has its block")
        spares = Counter(
            sequence.blocks[node.depth - 1]
            for sequence in sequences.values()
            if sequence.path[node.depth - 1 : node.depth] == [node] and sequence.blocks[node.depth - 1] != block
        )
        if (node.spares or {}) != spares:
            problems.append(f"{node!r} has the spares {node.spares}, expected {dict(spares)}")
    if set(users) - set(nodes.values()):
        problems.append("a path has nodes that are not in the tree")
    idle = sum(not node.users for node in nodes.values())
    if tree.idle != idle:
        problems.append(f"{tree.idle} nodes are counted as idle, expected {idle}")
    problems += _of_tree(tree, list(nodes.values()), size)
    for request_id, sequence in sequences.items():
        problems += [f"request {request_id!r}: {problem}" for problem in _of_sequence(sequence, nodes, tables, size)]
    return problems


def _of_blocks(tables: Counter[int], nodes: Mapping[int, Node], references: References) -> list[str]:
    problems = []
    free = Counter(references.free_blocks())
    for block, count in enumerate(references.counts()):
        if count != tables[block]:
            problems.append(f"block {block} counts {count} tables, expected {tables[block]}")
        if free[block] + (block in nodes or tables[block] > 0) != 1:
            problems.append(
                f"block {block} is free {free[block]} times, in {tables[block]} tables, in the tree: {block in nodes}"
            )
    return problems


def _of_tree(tree: PrefixTree, nodes: list[Node], size: int) -> list[str]:
    problems = []
    children: Counter[Node] = Counter()
    for node in nodes:
        parent = node.parent
        assert parent is not None
        children[parent] += 1
        if parent.children is None or parent.children.longest(node.tokens) != (node, len(node.tokens) // 4):
            problems.append(f"{node!r} is no child of its parent")
        if node.key:
            leaf = kvpool_native.hash_leaves(np.frombuffer(node.tokens, dtype="<i4"), size)
            if node.key != kvpool_native.chain_keys(parent.key, leaf) or tree.get(node.key) is not node:
                problems.append(f"{node!r} has another key than its tokens")
        elif node.children or node.users:
            problems.append(f"{node!r} is a tail and has children or users")
        if node.users > parent.users and parent.parent is not None:
            problems.append(f"{node!r} has more users than its parent, {parent.users}")
    for node in [*nodes, *tree.roots()]:
        if (len(node.children) if node.children is not None else 0) != children[node]:
            problems.append(f"{node!r} counts other children than the {children[node]} in the tree")
        problems += node.children.verify() if node.children is not None else []
    offered = {node for node in nodes if not node.users and not node.pins and node.is_leaf}
    if Counter(tree.offered()) != Counter(offered):
        problems.append(f"{len(tree.offered())} nodes are offered for eviction, expected {len(offered)}")
    return problems


def _of_sequence(sequence: Sequence, nodes: Mapping[int, Node], tables: Counter[int], size: int) -> list[str]:
    problems = []
    if not sequence.computed <= sequence.length <= sequence.slots <= len(sequence.blocks) * size:
        problems.append(f"{sequence!r} has {sequence.slots} slots")
    full = sequence.computed // size
    if not full <= len(sequence.path) <= full + 1:
        problems.append(f"a path of {len(sequence.path)} nodes for {full} full blocks")
    for number, key in enumerate(sequence.keys(min(full, len(sequence.path)))):
        if sequence.path[number].key != key:
            problems.append(f"node {number} of the path has another key")
    for number, block in enumerate(sequence.blocks):
        is_shared = tables[block] > 1 or block in nodes
        if is_shared and (number + 1) * size > sequence.computed and sequence.slots > sequence.computed > number * size:
            # Part of the block is computed: the rest must be nobody's to write, until it is copied.
            problems.append(f"block {block} is shared and has room that this request may write")
        if is_shared and number * size >= sequence.computed and sequence.restoring is None:
            problems.append(f"block {block} is shared before it is computed")
    return problems
