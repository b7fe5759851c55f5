"""Parts of the prefix tree: children in order, and the order of eviction."""

import random

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks.tree.child_order import RUN_MAX, ChildOrder
from kvpool_blocks.tree.eviction_order import EvictionOrder
from kvpool_blocks.tree.prefix_tree import NO_BLOCK, Node
from kvpool_blocks.tree.scope import Scope

pytestmark = pytest.mark.torch


def packed(tokens: list[int]) -> bytes:
    """Token ids as a tree has them."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_the_longest_head_is_that_of_a_search_through_all() -> None:
    chance = random.Random(5)
    order: ChildOrder[int] = ChildOrder()
    names: dict[bytes, int] = {}
    assert order.longest(packed([1])) == (None, 0)
    for number in range(6 * RUN_MAX):
        tokens = packed([chance.randrange(12) * 300 for _ in range(chance.randrange(1, 7))])
        if tokens not in names:
            order.add_child(tokens, number)
            names[tokens] = number
        elif chance.random() < 0.7:
            order.remove(tokens)
            del names[tokens]
        if number % 64 == 0:
            assert order.verify() == []
            wanted = packed([chance.randrange(12) * 300 for _ in range(6)])
            longest = max(_common(name, wanted) for name in names)
            found, count = order.longest(wanted)
            assert count == longest
            assert longest == 0 or found in [number for name, number in names.items() if _common(name, wanted) == count]
    for tokens in list(names):
        order.remove(tokens)
    assert not order
    assert order.verify() == []


def _common(one: bytes, other: bytes) -> int:
    pairs = [(one[at : at + 4], other[at : at + 4]) for at in range(0, min(len(one), len(other)), 4)]
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _node(priority: int, last_use_ns: int, duration_ns: int = 0) -> Node:
    node = Node(b"", NO_BLOCK, Scope(), b"")
    node.priority, node.last_use_ns, node.duration_ns = priority, last_use_ns, duration_ns
    return node


def test_lower_priorities_go_first_and_among_equals_the_one_used_longest_ago() -> None:
    order: EvictionOrder[Node] = EvictionOrder()
    nodes = [_node(35, 5), _node(35, 3), _node(0, 9), _node(90, 1)]
    for node in nodes:
        order.offer(node)
    found = []
    while (first := order.first(100)) is not None:
        order.withdraw(first)
        found.append(nodes.index(first))
    assert found == [2, 1, 0, 3]


def test_a_priority_with_a_duration_falls_back_to_the_default() -> None:
    order: EvictionOrder[Node] = EvictionOrder()
    high, plain = _node(90, 10, duration_ns=100), _node(35, 50)
    for node in (high, plain):
        order.offer(node)
    assert order.first(109) is plain
    assert order.first(110) is high
    assert (high.priority, high.duration_ns) == (35, 0)


def test_what_is_withdrawn_and_offered_again_leaves_no_heap_behind() -> None:
    order: EvictionOrder[Node] = EvictionOrder()
    nodes = [_node(35, number, duration_ns=10**9) for number in range(50)]
    for node in nodes:
        order.offer(node)
    for _ in range(200):
        for node in nodes:
            order.withdraw(node)
            order.offer(node)
    assert len(order) == len(order.offered()) == 50
    assert len(order._heap) < 300
    assert len(order._expiries) < 300
