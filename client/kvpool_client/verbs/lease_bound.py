"""Lease bound: the longest hit of a layout that one request names, and that one lease holds.

A full group takes one hold of each rank, each chunk of a window or a state one, and a lease has HOLDS_MAX of them. Pure
functions; any thread.
"""

from bisect import bisect_right
from collections.abc import Callable

from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX


def chunks_named(layout: Layout, ranks: int) -> int:
    """How many chunks the longest hit has whose keys, of so many ranks, one request has; 0 where there is none."""
    return _longest(layout, m.KEYS_MAX // ranks, lambda part, chunks: part.chunks_of(chunks))


def chunks_held(layout: Layout, ranks: int) -> int:
    """How many chunks the longest hit has that a lease of so many ranks holds: KEYS_MAX where its length does not matter, 0
    where there is none."""
    return _longest(layout, HOLDS_MAX // ranks, lambda part, chunks: 1 if part.is_chained else part.chunks_of(chunks))


def _longest(layout: Layout, limit: int, needs: Callable[[Layout, int], int]) -> int:
    """How many chunks the longest hit has that needs `limit` at most, of all groups; none has more than KEYS_MAX."""

    def needed(chunks: int) -> int:
        return sum(needs(part, chunks) for part in layout.group_layouts)

    return max(0, bisect_right(range(m.KEYS_MAX + 1), limit, key=needed) - 1)
