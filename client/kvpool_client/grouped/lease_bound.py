"""Lease bound: the longest hit of a layout with groups that one request names, and that one lease holds.

A full group takes one hold of each rank, each chunk of a window or a state one, and a lease has HOLDS_MAX of them, fewer at an
earlier daemon. Any thread.
"""

from bisect import bisect_right
from collections.abc import Callable

from kvpool.layout import Layout
from kvpool.layouts.groups import GroupRole
from kvpool.protocol import versions
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.groups import HOLDS_MAX, HOLDS_MAX_BEFORE
from kvpool_client.connection.link import Link


def chunks_named(layout: Layout, ranks: int) -> int:
    """How many chunks the longest hit has whose keys, of so many ranks, one request has; 0 where there is none."""
    return _longest(layout, m.KEYS_MAX // ranks, lambda role, chunks: role.chunks_of(chunks, layout.chunk_tokens))


class LeaseBound:
    """The longest hit that a lease of so many ranks holds, at the daemon that `link` is connected to."""

    def __init__(self, layout: Layout, ranks: int, link: Link) -> None:
        def needs(role: GroupRole, chunks: int) -> int:
            return 1 if role.is_full else role.chunks_of(chunks, layout.chunk_tokens)

        self._link = link
        self._chunks = {holds: _longest(layout, holds // ranks, needs) for holds in (HOLDS_MAX, HOLDS_MAX_BEFORE)}

    def __repr__(self) -> str:
        return f"<LeaseBound {self.chunks} chunks, {self.holds} holds>"

    @property
    def holds(self) -> int:
        """How many holds a lease has at most."""
        session = self._link.session
        is_before = session is not None and session.welcome.protocol < versions.HOLDS_SINCE
        return HOLDS_MAX_BEFORE if is_before else HOLDS_MAX

    @property
    def chunks(self) -> int:
        """How many chunks the hit has: KEYS_MAX where its length does not matter, 0 where there is none."""
        return self._chunks[self.holds]


def _longest(layout: Layout, limit: int, needs: Callable[[GroupRole, int], int]) -> int:
    """How many chunks the longest hit has that needs `limit` at most, of all groups; none has more than KEYS_MAX."""
    roles = [part.group for part in layout.group_layouts if part.group is not None]

    def needed(chunks: int) -> int:
        return sum(needs(role, chunks) for role in roles)

    return max(0, bisect_right(range(m.KEYS_MAX + 1), limit, key=needed) - 1)
